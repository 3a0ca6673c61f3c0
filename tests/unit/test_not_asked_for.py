"""The package installed where it isn't asked for, or can't serve: engines start as without it, or are
refused by name when their configuration asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.platforms import foreign
from vllm_kvoffload.platforms.ascend import hooks, symbols
from vllm_kvoffload.platforms.refusal import StartupRefusedError
from vllm_kvoffload.platforms.requested import request_of

SECTION = {"sparse_kv_offload_config": {"enabled": True}}
OURS = "vllm_kvoffload.connectors.ascend_store.connector"


def transfer(name: str, module: str | None = None, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra, kv_role="kv_both"
    )


def config(additional: Any = None, connector: Any = None) -> SimpleNamespace:
    return SimpleNamespace(additional_config=additional or {}, kv_transfer_config=connector)


# ------------------------------------------------------------------------------------------ what asks for us

ASKING: list[tuple[SimpleNamespace, str]] = [
    (config(SECTION), "additional_config.sparse_kv_offload_config"),
    (config({"sparse_kv_offload_config": {"enabled": "yes"}}), "sparse_kv_offload_config"),
    (config({"sparse_kv_offload_config": 1}), "sparse_kv_offload_config"),
    (config(None, transfer("SfaRemoteD2HConnector")), "kv_connector SfaRemoteD2HConnector"),
    (config(None, transfer("KVOffloadMultiConnector")), "kv_connector KVOffloadMultiConnector"),
    (config(None, transfer("Anything", OURS)), OURS),
    (config(None, transfer("AscendStoreConnector", backend="local")), "kv_connector AscendStoreConnector"),
    (
        config(None, transfer("MultiConnector", connectors=[{"kv_connector": "SfaRemoteD2HConnector"}])),
        "kv_connector SfaRemoteD2HConnector",
    ),
]
NOT_ASKING = [
    config(),
    config({"sparse_kv_offload_config": {"enabled": False, "topk_buffer_size": 1}}),
    config({"sparse_kv_offload_config": {}}),
    config({"ascend_scheduler_config": {"enabled": True}}, transfer("NixlConnector")),
    config(None, transfer("SfaRemoteD2HConnector", "somebody.elses.module")),
    config(None, transfer("MultiConnector", connectors=[{"kv_connector": "NixlConnector"}, "nonsense"])),
    SimpleNamespace(additional_config=object(), kv_transfer_config=None),
]


@pytest.mark.parametrize(
    ("given", "named"), ASKING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_asks(given: SimpleNamespace, named: str) -> None:
    assert named in request_of(given, store_is_shared=True)


@pytest.mark.parametrize("given", NOT_ASKING, ids=range(len(NOT_ASKING)))
def test_what_does_not(given: SimpleNamespace) -> None:
    assert request_of(given, store_is_shared=True) == request_of(given, store_is_shared=False) == ""


def test_the_store_s_name_is_shared_with_vllm_ascend() -> None:
    given = config(None, transfer("AscendStoreConnector", backend="memcache"))
    assert request_of(given, store_is_shared=True) == ""
    assert request_of(given, store_is_shared=False) == "kv_connector AscendStoreConnector"


# -------------------------------------------------------------------------------------------- other platforms


class NPUPlatform:
    """Stands for vllm-ascend's."""

    seen: list[Any]

    def __init__(self) -> None:
        self.seen = []

    def apply_config_platform_defaults(self, vllm_config: Any) -> None:
        self.seen.append(vllm_config)


NPUPlatform.__module__ = "vllm_ascend.platform"


class CudaPlatform(NPUPlatform):
    """Stands for vLLM's."""


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    given = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in given:
            raise metadata.PackageNotFoundError(name)
        return given[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("version", ["0.30.0rc2", "0.24.0rc1", "0.18.0"])
def test_beside_another_vllm_ascend(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_ascend=version)
    platform = NPUPlatform()
    hooks.adopt_platform(platform)
    hooks.adopt_platform(platform)
    assert type(platform) is NPUPlatform
    for given in NOT_ASKING:
        platform.apply_config_platform_defaults(given)
    assert platform.seen == NOT_ASKING
    for given, named in ASKING:
        with pytest.raises(StartupRefusedError) as caught:
            platform.apply_config_platform_defaults(given)
        line = str(caught.value)
        assert line.startswith(f"vllm-ascend='{version}': ")
        assert named in line
        assert "install vllm-ascend==0.23.0.post1" in line
        assert f"or leave {request_of(given, store_is_shared=True)} out" in line
        assert "\n" not in line
    assert platform.seen == NOT_ASKING


def test_beside_a_vllm_ascend_that_lacks_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_ascend=symbols.RELEASE)
    module = types.ModuleType("vllm_ascend.platform")
    module.NPUPlatform = NPUPlatform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_ascend", types.ModuleType("vllm_ascend"))
    monkeypatch.setitem(sys.modules, "vllm_ascend.platform", module)
    platform = NPUPlatform()
    hooks.adopt_platform(platform)
    platform.apply_config_platform_defaults(NOT_ASKING[0])
    with pytest.raises(StartupRefusedError, match=r"NPUPlatform\.check_and_update_config is missing"):
        platform.apply_config_platform_defaults(ASKING[0][0])


@pytest.mark.parametrize(
    ("versions", "environ", "line"),
    [
        (
            {"vllm": "0.32.0"},
            {},
            "vLLM's platform='CudaPlatform': .*NPUs with vllm-ascend",
        ),
        (
            {"vllm": "0.23.0", "vllm_ascend": "0.23.0"},
            {"VLLM_TARGET_DEVICE": "cpu"},
            "VLLM_TARGET_DEVICE='cpu'",
        ),
        (
            {"vllm": "0.23.0", "vllm_ascend": "0.23.0"},
            {"VLLM_PLUGINS": "kvoffload"},
            "VLLM_PLUGINS=.*the plugin ascend, .*add ascend to it",
        ),
        ({"vllm": "0.23.0", "vllm_ascend": "0.23.0"}, {}, "vllm-ascend's platform is installed and was not"),
        ({"vllm": "0.32.0+cpu"}, {"VLLM_PLUGINS": "kvoffload,other"}, "the plugin kvoffload_cpu,"),
        ({"vllm": "0.31.0+cpu"}, {}, "vllm='0.31.0.cpu': .*made for vLLM 0.32.0"),
    ],
)
def test_each_reason_is_named(
    versions: dict[str, str], environ: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, **versions)
    for name in ("VLLM_TARGET_DEVICE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    platform = CudaPlatform()
    foreign.watch(platform, lambda: foreign.platform_problem(platform), store_is_shared=False)
    platform.apply_config_platform_defaults(NOT_ASKING[0])
    with pytest.raises(StartupRefusedError, match=f"{line}.*or leave additional_config.sparse_kv"):
        platform.apply_config_platform_defaults(ASKING[0][0])


def test_a_core_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_kvoffload.ops._C", None)
    assert "does not load" in str(foreign.core_problem())
    installed(monkeypatch, vllm="0.32.0+cpu", vllm_ascend=symbols.RELEASE)
    from vllm_kvoffload import plugin

    assert plugin.cpu_platform() is None
    monkeypatch.setattr(hooks, "symbols_problem", lambda _: None)
    platform = NPUPlatform()
    hooks.adopt_platform(platform)
    platform.apply_config_platform_defaults(NOT_ASKING[0])
    with pytest.raises(StartupRefusedError, match="C\\+\\+ core does not load"):
        platform.apply_config_platform_defaults(ASKING[0][0])


# --------------------------------------------------------------------------------- real vLLM, in processes

PROBE = """
import json, os, sys
if os.environ.pop("BROKEN_CORE", ""):
    sys.modules["vllm_kvoffload.ops._C"] = None
before = dict(os.environ)
from vllm.engine.arg_utils import EngineArgs

def shown(value):
    text = repr(value)
    return text if " at 0x" not in text else type(value).__qualname__

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    config = EngineArgs(max_model_len=256, max_num_seqs=2, dtype="float32", **options).create_engine_config()
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.worker.cpu_worker import CPUWorker

    current_platform.register_triton_kernel_overrides()  # as a worker does
    registry = KVConnectorFactory._registry
    parts = {name: shown(getattr(config, name)) for name in vars(config) if name != "instance_id"}
    print("FOUND " + json.dumps({
        "config": parts,
        "hash": config.compute_hash(),
        "worker": config.parallel_config.worker_cls,
        "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
        "platform": type(current_platform).__name__,
        "connectors": {n: f"{registry[n]().__module__}" for n in ("MultiConnector", "NixlConnector")},
        "names": sorted(registry),
        "spin": list(shm_broadcast.SpinCondition.__init__.__defaults__),
        "recheck": shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS,
        "oot": sorted(op_registry_oot),
        "kernels": {n: repr(impl.__module__) for n, (_, impl) in dispatcher._registry.items()},
        "hook": sys.excepthook.__module__,
    }))
"""


def start(folder: Path, options: dict[str, Any], **environ: str) -> tuple[dict[str, Any], str]:
    """What an engine's configuration process finds, and its output."""
    script = folder / "probe.py"
    script.write_text(PROBE)
    clean = {n: v for n, v in os.environ.items() if n not in ("VLLM_PLUGINS", "KVOFFLOAD_SHORT_SPIN")}
    for name in ("VLLM_USE_BREAKABLE_CUDAGRAPH", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "VLLM_TARGET_DEVICE"):
        clean.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        env={**clean, **environ}, cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return (json.loads(found[0][6:]) if found else {}), done.stdout + done.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(build_checkpoint(folder / name, MODELS[name])) for name in ("mla", "glm-tiny")}


MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "engine_id": "same",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"kv_transfer_config": MULTI}], ids=["alone", "multi connector"])
def test_an_engine_that_does_not_ask_starts_as_without_us(
    models: dict[str, str], more: dict[str, Any], tmp_path: Path
) -> None:
    options = {"model": models["mla"], "enforce_eager": True, **more}
    without, text = start(tmp_path, options, VLLM_PLUGINS="none")
    assert without, text
    beside, text = start(tmp_path, options)
    assert beside, text
    # What stays, and why, is in docs/architecture.md.
    assert (without.pop("platform"), beside.pop("platform")) == ("CpuPlatform", "KVOffloadCPUPlatform")
    assert beside["environment"].pop("VLLM_USE_BREAKABLE_CUDAGRAPH") == "0"
    ours = {"SfaRemoteD2HConnector", "AscendStoreConnector", "KVOffloadMultiConnector"}
    assert set(beside.pop("names")) == set(without.pop("names")) | ours
    for name, part in without.pop("config").items():
        assert beside["config"][name] == part
    del beside["config"]
    assert beside == without


@pytest.mark.slow
def test_control_an_engine_that_asks_is_changed(models: dict[str, str], tmp_path: Path) -> None:
    options = {"model": models["glm-tiny"], "enforce_eager": True}
    found, text = start(tmp_path, options)
    assert found, text
    assert found["worker"].startswith("vllm_kvoffload.")
    assert found["spin"] != [1]
    assert {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "KVOFFLOAD_SHORT_SPIN"} <= set(found["environment"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE='cpu'"),
        ({"VLLM_PLUGINS": "kvoffload"}, "add kvoffload_cpu to it"),
        ({"VLLM_PLUGINS": "kvoffload_cpu"}, "add kvoffload to it"),
        ({"BROKEN_CORE": "1"}, "C++ core does not load"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_an_engine_that_asks_and_is_not_served_is_refused_by_name(
    models: dict[str, str], environ: dict[str, str], named: str, tmp_path: Path
) -> None:
    options = {"model": models["mla"], "enforce_eager": True}
    found, text = start(tmp_path, {**options, "additional_config": SECTION}, **environ)
    assert not found
    last = text.strip().splitlines()[-1]
    assert last.startswith("vllm-kvoffload: ")
    assert named in last
    assert "sparse_kv_offload_config" in last
    if "BROKEN_CORE" in environ:
        found, text = start(tmp_path, options, **environ)
        assert found["platform"] == "CpuPlatform", text
