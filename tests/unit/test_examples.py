"""The example scripts: they parse, and what they start has options that our own rules accept.

They run in a folder that has nothing but them and commands that write down how they were called.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_kvoffload.cli.proxy import settings_of
from vllm_kvoffload.demo.server import free_port
from vllm_kvoffload.layerwise.buffer_plan import BufferOptions
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV
from vllm_kvoffload.proxy.settings import ProxySettings
from vllm_kvoffload.settings.connectors import REMOTE_D2H, ConnectorPart, nested_parts
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import (
    SECTION,
    EngineFacts,
    parse_sparse_offload,
    validate_sparse_offload,
)
from vllm_kvoffload.settings.remote_d2h import parse_remote_d2h
from vllm_kvoffload.settings.store import find_store_options
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.store.memcache_conf import LOCAL_FILE, LOCAL_VARIABLE, META_FILE, META_VARIABLE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
RECORDER = """#!{python}
import json, os, socket, sys, time
from pathlib import Path
name, record = os.path.basename(sys.argv[0]), Path(os.environ["RECORD"])
if name == "python":
    sys.exit()
line = json.dumps([name, sys.argv[1:], dict(os.environ)]) + chr(10)
with record.open("a") as file:
    file.write(line)
if sys.argv[1] == "conf":
    sys.exit()
if sys.argv[1] == "meta":
    listening = socket.create_server(("127.0.0.1", int(os.environ["META_PORT"])))
end = time.monotonic() + 20
while len(record.read_text().splitlines()) < int(os.environ["EXPECTED"]) and time.monotonic() < end:
    time.sleep(0.01)
"""


@dataclass(frozen=True)
class Started:
    """A command of a script."""

    name: str
    arguments: list[str]
    environment: dict[str, str]

    def option(self, flag: str) -> str:
        return self.arguments[self.arguments.index(flag) + 1]

    def json(self, flag: str) -> dict[str, object] | None:
        found = json.loads(self.option(flag)) if flag in self.arguments else None
        assert found is None or isinstance(found, dict)
        return found


def run(folder: Path, script: str, expected: int, *arguments: str, **environment: str) -> list[Started]:
    """Commands started by a script, by port, those without one first; stops after `expected` commands."""
    (folder / "examples").mkdir()
    copy = folder / "examples" / script
    copy.write_text((EXAMPLES / script).read_text())
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("vllm", "kvoffload", "python", "make"):
        (commands / name).write_text(RECORDER.format(python=sys.executable))
        (commands / name).chmod(stat.S_IRWXU)
    (commands / "make").write_text("#!/bin/sh\n")
    record = folder / "record"
    record.touch()
    kept = {"PATH": f"{commands}:{os.environ['PATH']}", "RECORD": str(record), "EXPECTED": str(expected)}
    subprocess.run(
        ["bash", str(copy), *arguments],
        env={**kept, **environment},
        start_new_session=True,  # the script ends its whole process group
        timeout=60,
        check=False,
    )
    started = [Started(*json.loads(line)) for line in record.read_text().splitlines()]
    assert len(started) == expected
    return sorted(started, key=lambda one: int(one.option("--port")) if "--port" in one.arguments else 0)


def check_store(transfer: dict[str, Any], backend: str) -> dict[str, Any]:
    """The other part of a multi connector."""
    extra = transfer["kv_connector_extra_config"]
    whole = ConnectorPart(transfer["kv_connector"], transfer["kv_role"], extra)
    options = find_store_options(nested_parts(whole))
    assert options is not None
    assert options.backend == backend
    assert options.buffers == BufferOptions(3, (0,))
    assert backend != "local" or options.local_bytes == 2 * GIB
    remote, _ = extra["connectors"]
    assert isinstance(remote, dict)
    return remote


def check_engine(started: Started, device: str, tp_size: int = 1, store: str = "none") -> str:
    """Its role; raises what the engine would raise at its start."""
    assert started.arguments[0] == "serve"
    transfer = started.json("--kv-transfer-config")
    role = None
    if transfer is not None:
        role = str(transfer["kv_role"])
        if store != "none":
            transfer = check_store(transfer, store)
        assert transfer["kv_connector"] == REMOTE_D2H
        extra = transfer["kv_connector_extra_config"]
        parse_remote_d2h(role, int(str(transfer["kv_port"])), extra, device)  # type: ignore[arg-type]
    additional = started.json("--additional-config")
    offload = parse_sparse_offload(additional)
    assert (SECTION in (additional or {})) == offload.enabled == (role != "kv_producer")
    assert started.option("--tensor-parallel-size") == str(tp_size)
    if device == "npu" and offload.enabled:
        graphs = started.json("--compilation-config")
        assert ("--enforce-eager" in started.arguments) == (graphs is None)
        assert (graphs is None) == (KERNELS_ENV not in started.environment)
    facts = EngineFacts(
        index_topk=256 if device == "cpu" else 2048,
        block_size=64 if device == "cpu" else 128,
        kv_role=role,
        max_num_seqs=int(started.option("--max-num-seqs")),
        kv_cache_dtype="auto",
    )
    validate_sparse_offload(offload, facts)
    return role or "aggregated"


def check_proxy(started: Started) -> ProxySettings:
    assert started.name == "kvoffload"
    assert started.arguments[0] == "proxy"
    return settings_of(started.arguments[1:])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_aggregated(tmp_path: Path) -> None:
    (engine,) = run(tmp_path, "aggregated_cpu.sh", 1)
    assert check_engine(engine, "cpu") == "aggregated"


def check_memcache(commands: list[Started], host: str, services: int) -> None:
    """That its files are made, its service started, and that engines know of both."""
    conf, meta, *engines = commands
    assert [conf.arguments[0], meta.arguments[0]] == ["conf", "meta"]
    assert (conf.option("--meta-host"), conf.option("--services-per-node")) == (host, str(services))
    for one in (meta, *engines):
        assert one.environment["PYTHONHASHSEED"] == "0"
        files = [Path(one.environment[name]) for name in (META_VARIABLE, LOCAL_VARIABLE)]
        assert [file.name for file in files] == [META_FILE, LOCAL_FILE]
        assert str(files[0].parent).endswith(conf.option("--out"))
        assert all(file.is_absolute() for file in files)


@pytest.mark.parametrize("store", ["local", "memcache"])
def test_single_box_with_a_store(tmp_path: Path, store: str) -> None:
    more = {"STORE": store, "STORE_GB": "2", "PREFILL_TP": "2", "META_PORT": str(free_port())}
    device = {"local": "cpu", "memcache": "npu"}[store]
    if device == "npu":
        more |= {"PLATFORM": "ascend", "MODEL": "/models/a", "DECODE_TP": "1"}
    *service, prefill, decode, _ = run(tmp_path, "pd_single_box.sh", 3 + 2 * (store == "memcache"), **more)
    assert check_engine(prefill, device, 2, store) == "kv_producer"
    assert "--enforce-eager" in prefill.arguments
    assert check_engine(decode, device) == "kv_consumer"
    if store == "memcache":
        check_memcache([*service, prefill], "127.0.0.1", 2)
    else:
        assert service == []


@pytest.mark.parametrize("store", ["local", "memcache"])
def test_two_nodes_with_a_store(tmp_path: Path, store: str) -> None:
    more = {"STORE": store, "STORE_GB": "2", "PREFILL_TP": "4", "META_PORT": str(free_port())}
    more |= {"PLATFORM": "ascend", "MODEL": "/models/a", "PREFILL_HOST": "127.0.0.1"}
    expected = 2 + 2 * (store == "memcache")
    *service, first, second = run(tmp_path, "pd_two_nodes.sh", expected, "prefill", **more)
    for engine in (first, second):
        assert check_engine(engine, "npu", 4, store) == "kv_producer"
        assert "--enforce-eager" in engine.arguments
    if store == "memcache":
        check_memcache([*service, first, second], "127.0.0.1", 8)
    else:
        assert service == []


@pytest.mark.parametrize(("platform", "device"), [("cpu", "cpu"), ("ascend", "npu")])
def test_single_box(tmp_path: Path, platform: str, device: str) -> None:
    sizes = {"PREFILL_TP": "2", "DECODE_TP": "1", "MODEL": "/models/a"}
    prefill, decode, proxy = run(tmp_path, "pd_single_box.sh", 3, PLATFORM=platform, **sizes)
    assert check_engine(prefill, device, 2) == "kv_producer"
    assert check_engine(decode, device, 1) == "kv_consumer"
    settings = check_proxy(proxy)
    assert [str(address) for address in (*settings.prefillers, *settings.decoders)] == [
        f"{engine.option('--host')}:{engine.option('--port')}" for engine in (prefill, decode)
    ]
    for engine in (prefill, decode):
        assert engine.arguments[1] == "/models/a"
        assert engine.environment["VLLM_HOST_IP"] == "127.0.0.1"
    if platform == "ascend":
        devices = [engine.environment["ASCEND_RT_VISIBLE_DEVICES"].split(",") for engine in (prefill, decode)]
        assert not set(devices[0]) & set(devices[1])


@pytest.mark.parametrize(("platform", "device"), [("cpu", "cpu"), ("ascend", "npu")])
def test_two_nodes(tmp_path: Path, platform: str, device: str) -> None:
    sizes = {"PREFILL_TP": "8", "DECODE_TP": "4", "MODEL": "/models/a", "PLATFORM": platform}
    sizes[KERNELS_ENV] = "/ops.so"
    engines = {}
    for role in ("prefill", "decode"):
        (tmp_path / role).mkdir()
        engines[role] = run(tmp_path / role, "pd_two_nodes.sh", 2, role, **sizes)
    for role, kv_role, tp_size, host in (
        ("prefill", "kv_producer", 8, "192.0.2.1"),
        ("decode", "kv_consumer", 4, "192.0.2.2"),
    ):
        for number, engine in enumerate(engines[role]):
            assert check_engine(engine, device, tp_size) == kv_role
            assert engine.option("--host") == engine.environment["VLLM_HOST_IP"] == host
            ranks = range(number * tp_size, (number + 1) * tp_size)
            expected = ",".join(map(str, ranks)) if platform == "ascend" else ""
            assert engine.environment["ASCEND_RT_VISIBLE_DEVICES"] == expected
            extra = engine.json("--kv-transfer-config")["kv_connector_extra_config"]  # type: ignore[index]
            hosts = extra["decode_hosts" if role == "prefill" else "metaserver_hosts"]
            assert hosts == ["192.0.2.2"], "decode's node, where the proxy is too"
    ports = [one.json("--kv-transfer-config")["kv_port"] for one in engines["decode"]]  # type: ignore[index]
    assert ports == [20050, 20054], "a port for each rank"
    (proxy,) = run(tmp_path, "pd_two_nodes.sh", 1, "proxy", **sizes)
    settings = check_proxy(proxy)
    assert [str(address) for address in (*settings.prefillers, *settings.decoders)] == [
        f"{one.option('--host')}:{one.option('--port')}" for role in engines for one in engines[role]
    ]


def test_two_nodes_without_a_role(tmp_path: Path) -> None:
    assert run(tmp_path, "pd_two_nodes.sh", 0) == []


def test_the_control_a_wrong_option_is_found(tmp_path: Path) -> None:
    (engine,) = run(tmp_path, "aggregated_cpu.sh", 1, TOPK_BUFFER_SIZE="100")
    with pytest.raises(ConfigError, match="topk_buffer_size"):
        check_engine(engine, "cpu")
