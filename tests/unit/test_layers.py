"""Imports point downwards: the layers of the package, held to what its files really import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_kvoffload"

LAYERS = (
    {"foreign_text", "policies"},
    {"hostnames", "log"},
    {"settings", "runtime"},
    {"geometry", "memory", "ops", "transfer"},
    {"trace", "store"},
    {"sparse", "layerwise"},
    {"engine"},
    {"metrics"},
    {"connectors"},
    {"platforms"},
    {"plugin", "proxy"},
    {"demo", "cli"},
)
"""From the ground up: a package imports from lower layers only, and from its own."""

Graph = Mapping[str, set[str]]


def module_files() -> dict[str, Path]:
    """All modules of the package by name. `connectors` and `proxy` are links to folders beside it."""
    found = {}
    for path in (ROOT / PACKAGE).glob("**/*.py*"):  # with the stub of the compiled module
        found[path.relative_to(ROOT)] = path
    for link in ("connectors", "proxy"):
        for path in (ROOT / link).glob("**/*.py"):
            found[Path(PACKAGE, link) / path.relative_to(ROOT / link)] = path
    return {_name(relative): path for relative, path in found.items() if path.suffix in (".py", ".pyi")}


def _name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it: in functions and for types, too."""

    def targets(node: ast.stmt) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide where an arrow points"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else str(node.module)

    statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    return {target for node in statements for target in targets(node) if target in modules} - {name}


def graph() -> dict[str, set[str]]:
    modules = module_files()
    return {name: imports(name, path, modules) for name, path in modules.items()}


def package_of(module: str) -> str:
    """The layer's name: the first part under the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def circles(edges: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def upward(edges: Graph) -> list[str]:
    height = {package: level for level, packages in enumerate(LAYERS) for package in packages}
    return sorted(
        f"{source} -> {target}"
        for source, targets in edges.items()
        for target in targets
        if package_of(source) != package_of(target)
        and height[package_of(source)] <= height[package_of(target)]
    )


def test_every_package_has_a_layer() -> None:
    named = {package for packages in LAYERS for package in packages}
    assert {package_of(module) for module in module_files()} - {PACKAGE} == named


def test_imports_point_downwards() -> None:
    assert upward(graph()) == []


def test_there_is_no_import_circle() -> None:
    assert circles(graph()) == []


def test_a_circle_and_an_upward_import_are_found() -> None:
    """The control: the checks above can fail."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert upward({"vllm_kvoffload.store.local": {"vllm_kvoffload.platforms.parts"}}) == [
        "vllm_kvoffload.store.local -> vllm_kvoffload.platforms.parts"
    ]
