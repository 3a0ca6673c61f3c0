"""`kvoffload doctor` on machines that are folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_kvoffload.cli.doctor import Finding, Machine, Verdict, examine, numbers, print_findings
from vllm_kvoffload.cli.main import app

META = """
# MemCache's meta service
ock.mmc.meta_service_url = tcp://10.0.0.1:5000
ock.mmc.meta_service.config_store_url = tcp://10.0.0.1:6000
"""
LOCAL = """
ock.mmc.meta_service_url = tcp://10.0.0.1:5000
ock.mmc.local_service.config_store_url = tcp://10.0.0.1:6000
ock.mmc.local_service.protocol = device_rdma
"""
FILES = {
    "usr/local/Ascend/driver/version.info": "Version=25.5.1\n",
    "usr/local/Ascend/ascend-toolkit/latest/compiler/version.info": "timestamp=1\nVersion=9.1.0\n",
    "proc/sys/vm/nr_hugepages": "200000\n",
    "proc/meminfo": "MemTotal: 1 kB\nHugepagesize:       2048 kB\n",
    "proc/sys/kernel/osrelease": "5.15.0-91-generic\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/devices/system/node/online": "0-3\n",
    "proc/self/status": "Mems_allowed_list:\t0-3\n",
    "etc/meta.conf": META,
    "etc/local.conf": LOCAL,
    "opt/ops.so": "",
    "site/memfabric_hybrid/lib/libmf_hybm_accoffload.so": "built",
}
ENVIRON = {
    "PYTHONHASHSEED": "0",
    "MMC_META_CONFIG_PATH": "/etc/meta.conf",
    "MMC_LOCAL_CONFIG_PATH": "/etc/local.conf",
    "KVOFFLOAD_ASCEND_OPS": "/opt/ops.so",
}
PACKAGES = {
    "vllm": "0.23.0", "vllm-ascend": "0.23.0.post1", "memfabric_hybrid": "1.3.0", "memcache_hybrid": "1.3.0",
    "rich": "14.0.1", "pyzmq": "26.4.0",
}  # fmt: skip
NEEDS = ["rich>=13", "pyzmq>=26.1", 'uvloop>=0.19; extra == "proxy"']


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One that lacks nothing."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Machine(
        tmp_path, ENVIRON, range(20050, 20054), PACKAGES.get, (tmp_path / "site").joinpath, lambda _: True,
        lambda: NEEDS, lambda: "",
    )  # fmt: skip


def wrong(machine: Machine) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(machine) if finding.verdict is not Verdict.OK}


def test_a_machine_that_lacks_nothing(machine: Machine) -> None:
    assert wrong(machine) == {}
    assert all(not finding.fix for finding in examine(machine))


@pytest.mark.parametrize(
    ("file", "text", "check", "verdict", "says"),
    [
        ("usr/local/Ascend/driver/version.info", "Version=25.3.0", "NPU driver", "fail", "25.5.1 or later"),
        ("usr/local/Ascend/driver/version.info", "nothing", "NPU driver", "fail", "25.5.1 or later"),
        ("usr/local/Ascend/driver/version.info", None, "NPU driver", "fail", "25.5.1 or later"),
        (
            "usr/local/Ascend/ascend-toolkit/latest/compiler/version.info",
            "Version=8.5.0", "CANN", "fail", "9.1.0 or later",
        ),
        ("proc/sys/vm/nr_hugepages", "0", "huge pages", "warn", "nr_hugepages"),
        ("proc/sys/vm/nr_hugepages", "199000", "huge pages", "warn", "512 for each GiB"),
        ("proc/meminfo", "Hugepagesize: 1024 kB", "huge pages", "warn", "1024 for each GiB"),
        ("proc/sys/kernel/osrelease", "5.10.0-216.oe2203", "kernel", "warn", "later than 5.10"),
        ("proc/sys/kernel/osrelease", None, "kernel", "warn", "later than 5.10"),
        ("proc/sys/vm/overcommit_memory", "2", "kernel", "warn", "overcommit_memory"),
        ("proc/self/status", "Mems_allowed_list:\t1-2\n", "NUMA nodes", "warn", "cpuset"),
        ("etc/local.conf", None, "MMC_LOCAL_CONFIG_PATH", "warn", "export MMC_LOCAL_CONFIG_PATH"),
        ("etc/local.conf", LOCAL.replace("6000", "6001"), "MemCache's files", "fail", "tcp://10.0.0.1:6000"),
        ("etc/local.conf", LOCAL.replace("device_rdma", "tcp"), "MemCache's files", "fail", "device_sdma"),
        ("etc/meta.conf", "", "MemCache's files", "fail", "ock.mmc.meta_service_url"),
        ("opt/ops.so", None, "AscendC operators", "fail", "docs/ascend-build.md"),
    ],
)  # fmt: skip
def test_one_file_is_wrong(
    machine: Machine, file: str, text: str | None, check: str, verdict: str, says: str
) -> None:
    path = machine.root / file
    path.unlink() if text is None else path.write_text(text)
    found = wrong(machine)
    assert list(found) == [check]
    assert found[check].verdict == verdict
    assert says in found[check].fix


@pytest.mark.parametrize(
    ("package", "version", "verdict"),
    [
        ("vllm-ascend", None, "fail"), ("vllm-ascend", "0.22.1", "fail"), ("vllm-ascend", "0.24.0", "fail"),
        ("vllm", None, "fail"), ("vllm", "0.24.1", "fail"),
        ("memfabric_hybrid", "1.4.0", "fail"),
        ("memcache_hybrid", None, "warn"), ("memcache_hybrid", "1.1.0", "warn"),
    ],
)  # fmt: skip
def test_one_package_is_wrong(machine: Machine, package: str, version: str | None, verdict: str) -> None:
    versions = {**PACKAGES, package: version}
    found = wrong(replace(machine, version=versions.get))
    assert list(found) == [package]
    assert found[package].verdict == verdict
    assert "image" in found[package].fix or "install" in found[package].fix


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        ("PYTHONHASHSEED", "", "PYTHONHASHSEED"),
        ("PYTHONHASHSEED", "random", "PYTHONHASHSEED"),
        ("KVOFFLOAD_ASCEND_OPS", "", "AscendC operators"),
    ],
)
def test_one_variable_is_wrong(machine: Machine, variable: str, value: str, check: str) -> None:
    found = wrong(replace(machine, environ={**ENVIRON, variable: value}))
    assert list(found) == [check]
    assert found[check].verdict is Verdict.WARN


@pytest.mark.parametrize("release", ["1.2.0", "1.2.1", "1.3.0"])
def test_both_lines_of_memfabric_and_memcache(machine: Machine, release: str) -> None:
    versions = {**PACKAGES, "memfabric_hybrid": release, "memcache_hybrid": release}
    environ = {**ENVIRON, "MEMFABRIC_HYBRID_EXTEND_LIB_PATH": "/opt/memfabric"}
    (machine.root / "opt/memfabric").mkdir(parents=True)
    (machine.root / "opt/memfabric/libmf_hybm_accoffload.so").write_text("built")
    assert wrong(replace(machine, version=versions.get, environ=environ)) == {}
    versions["memcache_hybrid"] = None
    assert list(wrong(replace(machine, version=versions.get, environ=environ))) == ["memcache_hybrid"]


def test_memfabric_and_memcache_of_different_releases(machine: Machine) -> None:
    versions = {**PACKAGES, "memcache_hybrid": "1.2.0"}
    found = wrong(replace(machine, version=versions.get))
    assert list(found) == ["MemCache's MemFabric"]
    assert "both of one release" in found["MemCache's MemFabric"].fix


@pytest.mark.parametrize(
    ("release", "fix"),
    [
        ("1.2.0", "memfabric-hybrid==1.3.0"),
        ("1.2.1", "mfcli kernel install"),
        ("1.3.0", "mfcli kernel install"),
    ],
)
def test_memfabric_whose_kernels_are_not_built(machine: Machine, release: str, fix: str) -> None:
    """Releases from 1.2.1 on have an empty file there until they are built, 1.2.0 has none."""
    (machine.root / "site/memfabric_hybrid/lib/libmf_hybm_accoffload.so").write_text("")
    versions = {**PACKAGES, "memfabric_hybrid": release, "memcache_hybrid": release}
    found = wrong(replace(machine, version=versions.get))
    assert list(found) == ["MemFabric's kernels"]
    assert found["MemFabric's kernels"].verdict is Verdict.FAIL
    assert fix in found["MemFabric's kernels"].fix
    without = wrong(replace(machine, version={**PACKAGES, "memfabric_hybrid": None}.get))
    assert {"memfabric_hybrid", "MemFabric's kernels"} <= set(without)


@pytest.mark.parametrize(
    ("environ", "verdict", "says"),
    [
        ({"VLLM_TARGET_DEVICE": "cpu"}, "fail", "unset VLLM_TARGET_DEVICE"),
        ({"VLLM_PLUGINS": "ascend,ascend_kv_connector"}, "fail", "add kvoffload,kvoffload_metrics"),
        ({"VLLM_PLUGINS": "ascend,kvoffload"}, "warn", "add kvoffload_metrics"),
        ({"VLLM_PLUGINS": "kvoffload,kvoffload_metrics"}, "fail", "add ascend"),
        ({"VLLM_PLUGINS": "ascend,kvoffload,kvoffload_metrics"}, "ok", ""),
    ],
)
def test_plugins_left_out(machine: Machine, environ: dict[str, str], verdict: str, says: str) -> None:
    (found,) = (f for f in examine(replace(machine, environ={**ENVIRON, **environ})) if f.check == "plugins")
    assert found.verdict == verdict
    assert says in found.fix


@pytest.mark.parametrize("version", [None, "26.0.2"])
def test_a_dependency_that_no_deps_left_out(machine: Machine, version: str | None) -> None:
    found = wrong(replace(machine, version={**PACKAGES, "pyzmq": version}.get))
    assert list(found) == ["dependencies"]
    assert found["dependencies"].fix == "pip install --no-deps 'pyzmq>=26.1'"


def test_a_core_that_does_not_load(machine: Machine) -> None:
    found = wrong(replace(machine, core=lambda: "GLIBCXX_3.4.32 not found"))
    assert list(found) == ["C++ core"]
    assert "GLIBCXX" in found["C++ core"].found


def test_huge_pages_of_a_kernel_with_large_pages(machine: Machine) -> None:
    """64 KiB pages on aarch64: a huge page is 512 MiB, so that few are enough."""
    (machine.root / "proc/meminfo").write_text("Hugepagesize: 524288 kB\n")
    (machine.root / "proc/sys/vm/nr_hugepages").write_text("800")
    assert wrong(machine) == {}
    (machine.root / "proc/sys/vm/nr_hugepages").write_text("700")
    assert "2 for each GiB" in wrong(machine)["huge pages"].fix


def test_ports(machine: Machine) -> None:
    taken = wrong(replace(machine, free=lambda port: port != 20052))
    assert "20052" in taken["ports"].found
    assert wrong(replace(machine, ports=range(65530, 65538)))["ports"].verdict is Verdict.FAIL


def test_versions_in_texts() -> None:
    assert numbers("Version=25.5.1") == (25, 5, 1)
    assert numbers("no number, 7") == ()


def test_fixes_are_printed_whole(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    findings = examine(replace(machine, environ={}))
    print_findings(findings, Console(width=60))
    printed = capsys.readouterr().out
    for finding in findings:
        assert finding.fix in printed


def test_command(machine: Machine) -> None:
    result = CliRunner().invoke(app, ["doctor", "--root", str(machine.root)])
    assert result.exit_code == 1  # this test's environment has no vllm-ascend
    assert "vllm-ascend" in result.output
