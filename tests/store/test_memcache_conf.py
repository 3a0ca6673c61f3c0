"""`kvoffload conf` and the rules of MemCache's two files."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_kvoffload.cli.main import app
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store import memcache_conf
from vllm_kvoffload.store.memcache_conf import Cluster, Endpoint, read_local, read_meta, render, size_bytes

CLUSTER = Cluster(
    meta=Endpoint("10.0.0.1", 5000),
    config_store=Endpoint("10.0.0.1", 6000),
    metrics=Endpoint("127.0.0.1", 8000),
    nodes=2,
    services_per_node=8,
)


def conf(*options: object) -> Result:
    return CliRunner().invoke(app, ["conf", *map(str, options)])


def test_the_documented_cluster(tmp_path: Path) -> None:
    """The files of vLLM-Ascend's guide, but for the comments and MemCache's metrics."""
    result = conf(
        "--out", tmp_path, "--meta-host", "META_HOST".lower().replace("_", "-"), "--world-size", 256
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mmc-meta.conf").read_text().splitlines() == [
        "ock.mmc.meta_service_url = tcp://meta-host:5000",
        "ock.mmc.meta_service.config_store_url = tcp://meta-host:6000",
        "ock.mmc.meta_service.metrics_url = http://127.0.0.1:8000",
        "ock.mmc.meta.lease_ttl_ms = 30000",
        "ock.mmc.log_level = error",
    ]
    assert (tmp_path / "mmc-local.conf").read_text().splitlines() == [
        "ock.mmc.meta_service_url = tcp://meta-host:5000",
        "ock.mmc.local_service.config_store_url = tcp://meta-host:6000",
        "ock.mmc.log_level = error",
        "ock.mmc.local_service.world_size = 256",
        "ock.mmc.local_service.protocol = device_sdma",
        "ock.mmc.local_service.dram.size = 10GB",
    ]
    assert f"export MMC_LOCAL_CONFIG_PATH={tmp_path / 'mmc-local.conf'}" in result.output
    assert f"export MMC_META_CONFIG_PATH={tmp_path / 'mmc-meta.conf'}" in result.output
    assert "export PYTHONHASHSEED=0" in result.output


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    for name, text in render(replace(CLUSTER, meta=Endpoint("fd00::1", 5000))).items():
        (tmp_path / name).write_text(text)
    assert read_meta(tmp_path / "mmc-meta.conf") == (Endpoint("fd00::1", 5000), CLUSTER.config_store)
    local = read_local(tmp_path / "mmc-local.conf")
    assert local.meta == Endpoint("fd00::1", 5000)
    assert (local.world_size, local.protocol, local.dram_bytes) == (16, "device_sdma", 10 << 30)
    assert conf("--check", tmp_path, "--nodes", 2, "--services-per-node", 8).exit_code == 0


@pytest.mark.parametrize(
    ("change", "key", "rule"),
    [
        ({"world_size": 15}, "world_size", "from 16, the number of local services"),
        ({"world_size": 1025}, "world_size", "to 1024"),
        ({"services_per_node": 600}, "world_size", "from 1200"),
        ({"nodes": 0}, "nodes", "from 1"),
        ({"lease_ttl_ms": 0}, "lease_ttl_ms", "from 1"),
        ({"protocol": "sdma"}, "protocol", "device_sdma"),
        ({"protocol": "host_shm"}, "protocol", "does not reach 2 nodes"),
        ({"dram_size": "ten"}, "dram_size", "a number with"),
        ({"dram_size": "0GB"}, "dram_size", "above 0"),
        ({"dram_size": "2TB"}, "dram_size", "at most 1TB"),
        ({"dram_size": "1.5GB"}, "dram_size", "whole GB with device_sdma"),
        ({"log_level": "trace"}, "log_level", "debug, info"),
        ({"meta": Endpoint("0.0.0.0", 5000)}, "meta_host", "can't stand for all"),
        ({"meta": Endpoint("::", 5000)}, "meta_host", "can't stand for all"),
        ({"meta": Endpoint("127.0.0.1", 5000)}, "meta_host", "loopback"),
        ({"config_store": Endpoint("localhost", 6000)}, "config_store_host", "loopback"),
        ({"meta": Endpoint("a b", 5000)}, "meta_host", "host name"),
        ({"meta": Endpoint("a..b", 5000)}, "meta_host", "host name"),
        ({"meta": Endpoint("a" * 64, 5000)}, "meta_host", "host name"),
        ({"meta": Endpoint(".".join(["a" * 60] * 5), 5000)}, "meta_host", "host name"),
        ({"meta": Endpoint("fe80::1%eth0", 5000)}, "meta_host", "interface"),
        ({"meta": Endpoint("[fd00::1]", 5000)}, "meta_host", "without brackets"),
        ({"meta": Endpoint("127.1", 5000)}, "meta_host", "host name"),
        ({"meta": Endpoint("☃", 5000)}, "meta_host", "one line"),
        ({"dram_size": "9" * 400 + "GB"}, "dram_size", "a number with"),
        ({"dram_size": "\uff11\uff10GB"}, "dram_size", "one line"),
        ({"meta": Endpoint("10.0.0.1", 0)}, "meta_port", "1 to 65535"),
        ({"config_store": Endpoint("10.0.0.1", 5000)}, "config_store_port", "three ports"),
    ],
)
def test_clusters_that_cannot_work(change: dict[str, object], key: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(replace(CLUSTER, **change))  # type: ignore[arg-type]
    assert caught.value.key == key
    assert rule in str(caught.value)


BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\0", "\t", "\x1b"]


@pytest.mark.parametrize(
    "value", [f"{{}}{end}ock.mmc.evil = 1" for end in BREAKS] + [f"{{}}{e}" for e in BREAKS]
)
def test_no_value_holds_a_line_end(tmp_path: Path, value: str) -> None:
    """An IPv6 address takes anything behind its %, a size any white space around it."""
    for field, plain in (("protocol", "host_tcp"), ("dram_size", "10GB"), ("log_level", "error")):
        with pytest.raises(ConfigError, match="one line") as caught:
            render(replace(CLUSTER, **{field: value.format(plain)}))  # type: ignore[arg-type]
        assert caught.value.key == field
        assert len(str(caught.value).splitlines()) == 1
    for host in ("a", "10.0.0.1", "fe80::1%", "fe80::1%eth0"):
        for field in ("meta", "config_store", "metrics"):
            with pytest.raises(ConfigError, match="one line"):
                render(replace(CLUSTER, **{field: Endpoint(value.format(host), 7)}))  # type: ignore[arg-type]
    if "\0" not in value:
        assert conf("--out", tmp_path, "--dram-size", value.format("10GB")).exit_code == 2
        assert not list(tmp_path.iterdir())


def test_a_folder_of_any_name_can_be_exported(tmp_path: Path) -> None:
    folder = tmp_path / "a b;'$(false)"
    said = conf("--out", folder)
    assert said.exit_code == 0
    script = said.output + '\ntest -f "$MMC_META_CONFIG_PATH" && test -f "$MMC_LOCAL_CONFIG_PATH"'
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 0


def test_one_machine_may_use_shared_memory_and_loopback() -> None:
    here = Endpoint("127.0.0.1", 5000)
    store = Endpoint("127.0.0.1", 6000)
    made = replace(CLUSTER, nodes=1, meta=here, config_store=store, protocol="host_shm", dram_size="64MB")
    assert "world_size = 8\n" in render(made)["mmc-local.conf"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("134217728", 1 << 27), ("2048KB", 1 << 21), ("200m", 200 << 20), ("2.5GB", 5 << 29), ("1TB", 1 << 40)],
)
def test_sizes_as_memcache_writes_them(text: str, expected: int) -> None:
    assert size_bytes("k", text) == expected


def files(folder: Path, **changes: str) -> Path:
    """Both files of CLUSTER, with values replaced: meta__KEY or local__KEY, dots as underscores."""
    for name, text in render(CLUSTER).items():
        lines = text.splitlines()
        for key, value in changes.items():
            where, _, ending = key.partition("__")
            if where in name:
                setting = f"{ending} = "
                lines = [f"{line.split()[0]} = {value}" if setting in line else line for line in lines]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local__meta_service_url": "tcp://10.0.0.2:5000"}, "meta_service_url='tcp://10.0.0.2:5000'"),
        ({"local__config_store_url": "tcp://10.0.0.1:6001"}, "config_store_url='tcp://10.0.0.1:6001'"),
        ({"meta__config_store_url": "tcp://10.0.0.1:6001"}, "which has tcp://10.0.0.1:6001"),
        ({"local__world_size": "15"}, "from 16"),
        ({"local__world_size": "many"}, "whole number"),
        ({"local__meta_service_url": "10.0.0.1:5000"}, "must be tcp://HOST:PORT"),
        ({"local__meta_service_url": "tcp://10.0.0.1:70000"}, "must be tcp://HOST:PORT"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    result = conf("--check", files(tmp_path, **changes), "--nodes", 2, "--services-per-node", 8)
    assert result.exit_code == 2
    assert said in result.output


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "can't be read" in conf("--check", tmp_path).output
    files(tmp_path)
    (tmp_path / "mmc-local.conf").write_text("# all there is\nworld_size 3\n")
    assert "line 2 is not key = value" in conf("--check", tmp_path).output
    (tmp_path / "mmc-local.conf").write_text("ock.mmc.local_service.protocol = host_shm\n")
    assert "is missing in" in conf("--check", tmp_path).output


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    assert conf("--out", tmp_path).exit_code == 0
    again = conf("--out", tmp_path, "--dram-size", "20GB")
    assert again.exit_code == 2
    assert "--force" in again.output
    assert "10GB" in (tmp_path / "mmc-local.conf").read_text()
    assert conf("--out", tmp_path, "--dram-size", "20GB", "--force").exit_code == 0
    assert "20GB" in (tmp_path / "mmc-local.conf").read_text()


@pytest.mark.parametrize(("given", "meant"), [("64", "64GB"), ("1500MB", "2GB")])
def test_sizes_without_a_unit_are_taken_for_gigabytes(tmp_path: Path, given: str, meant: str) -> None:
    assert f'set it to "{meant}"' in conf("--out", tmp_path, "--dram-size", given).output


@pytest.mark.parametrize("options", [(), ("--out", "a", "--check", "b")])
def test_one_of_two_things_is_asked_for(options: tuple[str, ...]) -> None:
    assert "use --out FOLDER or --check FOLDER" in conf(*options).output


def test_every_protocol_has_a_meaning() -> None:
    for protocol in memcache_conf.PROTOCOLS:
        render(replace(CLUSTER, nodes=1, protocol=protocol))


def meta(*options: object) -> Result:
    return CliRunner().invoke(app, ["meta", *map(str, options)])


def test_a_meta_service_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memcache_hybrid", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MMC_META_CONFIG_PATH", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [made.getsockname()[1] for made in (taken, other)]
    result = meta("--meta-port", ports[0], "--config-store-port", ports[1])
    assert result.exit_code == 2
    assert ".[store]" in result.output
    assert not list(tmp_path.iterdir()), "its own file stays"


def test_a_meta_service_on_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMC_META_CONFIG_PATH", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = meta("--meta-port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "can't be listened at on this machine" in result.output


def test_a_meta_service_with_a_file_that_cannot_work(tmp_path: Path) -> None:
    assert "can't be read" in meta("--config", tmp_path / "mmc-meta.conf").output
    assert "three ports" in meta("--meta-port", 5000, "--config-store-port", 5000).output
