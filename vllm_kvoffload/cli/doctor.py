"""`kvoffload doctor`: reports missing prerequisites of the offload on an Ascend machine. Changes nothing.

All files are read below a root folder, so that tests can simulate a machine; the process environment and
the versions of Python packages are passed in.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_kvoffload.platforms.ascend.symbols import OLDEST, RELEASE, TOO_NEW

LEAST_DRIVER = (25, 5, 1)
LEAST_CANN = (8, 5)
HUGE_PAGES = 200000
VLLM = (0, 23)
MEMFABRIC, MEMCACHE = (1, 2), (1, 3)
COPY_KERNEL = "libmf_hybm_accoffload.so"
DRIVER_INFO = ("usr/local/Ascend/driver/version.info", "var/driver/version.info")
CANN_INFO = (
    "usr/local/Ascend/cann/compiler/version.info",
    "usr/local/Ascend/ascend-toolkit/latest/compiler/version.info",
    "usr/local/Ascend/ascend-toolkit/latest/runtime/version.info",
)
META_URL, META_STORE = "ock.mmc.meta_service_url", "ock.mmc.meta_service.config_store_url"
LOCAL_STORE, PROTOCOL = "ock.mmc.local_service.config_store_url", "ock.mmc.local_service.protocol"
EXTEND = "MEMFABRIC_HYBRID_EXTEND_LIB_PATH"
PROTOCOLS = ("device_sdma", "device_rdma")


class Verdict(str, Enum):
    """Result of a check. WARN: only some deployments need it."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Finding of a check and its fix, "" if nothing is wrong."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine under examination.

    ports: needed by decode's control plane; free: whether a port can be bound. version, folder: of an
    installed package, None if it is not installed.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] | None = None
    ports: range = range(0)
    version: Callable[[str], str | None] | None = None
    folder: Callable[[str], Path | None] | None = None
    free: Callable[[int], bool] | None = None

    def variable(self, name: str) -> str:
        return (self.environ or {}).get(name, "")

    def read(self, path: str) -> str | None:
        """Returns the text of a file below the root, None if it does not exist."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return None

    def installed(self, name: str) -> str | None:
        """Returns the version of a Python package, None if it is not installed."""
        return (self.version or installed_version)(name)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_folder(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def can_bind(port: int) -> bool:
    """Whether no process listens on a local port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def numbers(text: str) -> tuple[int, ...]:
    """Parses the first dotted number in a text: "Version=25.5.1" gives (25, 5, 1)."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_file_version(
    machine: Machine, what: str, paths: tuple[str, ...], least: tuple[int, ...]
) -> Finding:
    """Checks a version that driver or CANN record in a file."""
    fix = f"install {what} {dotted(least)} or later"
    for path in paths:
        text = machine.read(path)
        if text is None:
            continue
        line = next((line for line in text.splitlines() if "ersion" in line and numbers(line)), "")
        found = numbers(line)
        if not found:
            return Finding(what, Verdict.FAIL, f"{path} names no version", fix)
        good = found >= least
        return Finding(what, Verdict.OK if good else Verdict.FAIL, dotted(found), "" if good else fix)
    return Finding(what, Verdict.FAIL, f"none of {', '.join(paths)}", fix)


def check_package(
    machine: Machine,
    name: str,
    fits: Callable[[tuple[int, ...]], bool],
    fix: str,
    verdict: Verdict = Verdict.FAIL,
) -> Finding:
    """Checks that a package is installed in a supported release."""
    found = machine.installed(name)
    if found is not None and fits(numbers(found)):
        return Finding(name, Verdict.OK, found)
    return Finding(name, verdict, found or "not installed", fix)


def check_packages(machine: Machine) -> list[Finding]:
    """Checks vLLM, vllm-ascend, MemFabric, and MemCache, which needs a MemFabric of its own release."""
    cache = machine.installed("memcache_hybrid")
    least = MEMFABRIC if cache is None else MEMCACHE
    who = "P/D and the host pool" if cache is None else f"memcache_hybrid {cache}"
    return [
        check_package(
            machine,
            "vllm",
            lambda version: version[:2] == VLLM,
            f"pip install vllm=={dotted(VLLM)}.0, which vllm-ascend {RELEASE} is made for",
        ),
        check_package(
            machine,
            "vllm-ascend",
            lambda version: version >= OLDEST and version[:2] < TOO_NEW,
            f"pip install vllm-ascend=={RELEASE}",
        ),
        check_package(
            machine,
            "memfabric_hybrid",
            lambda version: version >= least,
            f"{who} needs {dotted(least)} or later: install it, see docs/ascend.md",
        ),
        check_package(
            machine,
            "memcache_hybrid",
            lambda version: version >= MEMCACHE,
            f"a KV store of many prefill engines needs {dotted(MEMCACHE)} or later: pip install '.[store]', "
            "see docs/ascend.md",
            Verdict.WARN,
        ),
    ]


def check_copy_kernel(machine: Machine) -> Finding:
    """Checks MemFabric's copy kernels: 1.2 finds them by a variable, 1.3 beside its libraries, where they
    must be built."""
    name = "MemFabric's kernels"
    folder = (machine.folder or package_folder)("memfabric_hybrid")
    built = folder / "lib" / COPY_KERNEL if folder is not None else None
    if built is not None and built.is_file() and built.stat().st_size:
        return Finding(name, Verdict.OK, str(built))
    path = machine.variable(EXTEND)
    if path and (machine.root / path.lstrip("/")).is_dir():
        return Finding(name, Verdict.OK, path)
    found = f"{path}: no such folder" if path else "not built" if built is not None else "not there"
    fix = (
        f"release 1.3: mfcli kernel install, with CANN and torch_npu; 1.2: its set_env.sh, or export {EXTEND}"
    )
    return Finding(name, Verdict.WARN, found, fix)


def check_hugepages(machine: Machine) -> Finding:
    text = machine.read("proc/sys/vm/nr_hugepages") or "0"
    pages = int(text.strip() or 0)
    good = pages >= HUGE_PAGES
    fix = (
        "as root, on each host: echo PAGES > /proc/sys/vm/nr_hugepages, with 512 for each GiB of host pools "
        f"and of MemCache's DRAM, and some more; {HUGE_PAGES} are {HUGE_PAGES // 512} GiB"
    )
    return Finding("huge pages", Verdict.OK if good else Verdict.WARN, str(pages), "" if good else fix)


def check_hash_seed(machine: Machine) -> Finding:
    seed = machine.variable("PYTHONHASHSEED")
    good = seed.isdigit()
    found = seed or "not set"
    fix = "export PYTHONHASHSEED=0, the same on every engine that shares a KV store"
    return Finding("PYTHONHASHSEED", Verdict.OK if good else Verdict.WARN, found, "" if good else fix)


def check_ports(machine: Machine) -> Finding:
    if not machine.ports:
        return Finding("ports", Verdict.OK, "none asked for (--kv-port, --ranks)")
    shown = f"{machine.ports.start} to {machine.ports.stop - 1}"
    if machine.ports.start < 1 or machine.ports.stop > 65536:
        fix = f"choose a kv_port from 1 to {65536 - len(machine.ports)}"
        return Finding("ports", Verdict.FAIL, f"{shown} are no ports", fix)
    taken = [port for port in machine.ports if not (machine.free or can_bind)(port)]
    if taken:
        fix = "choose a kv_port with as many free ports as decode has DP x TP ranks"
        return Finding("ports", Verdict.FAIL, f"taken: {', '.join(map(str, taken))}", fix)
    return Finding("ports", Verdict.OK, f"{shown} are free")


def check_kernels(machine: Machine) -> Finding:
    path = machine.variable("KVOFFLOAD_ASCEND_OPS")
    if path and (machine.root / path.lstrip("/")).is_file():
        return Finding("AscendC operators", Verdict.OK, path)
    found = f"{path}: no such file" if path else "KVOFFLOAD_ASCEND_OPS is not set: plans are made on the host"
    fix = "build them (docs/ascend-build.md) and export KVOFFLOAD_ASCEND_OPS with the library's path"
    return Finding("AscendC operators", Verdict.FAIL if path else Verdict.WARN, found, fix)


def parse_conf(text: str) -> dict[str, str]:
    """Parses the `key = value` lines of MemCache's configuration files."""
    pairs = (
        line.split("=", 1) for line in text.splitlines() if "=" in line and not line.strip().startswith("#")
    )
    return {key.strip(): value.strip() for key, value in pairs}


def check_conf_files(machine: Machine) -> list[Finding]:
    """Checks MemCache's two files separately and against each other."""
    found: dict[str, dict[str, str]] = {}
    findings = []
    for name in ("MMC_META_CONFIG_PATH", "MMC_LOCAL_CONFIG_PATH"):
        path = machine.variable(name)
        text = machine.read(path) if path else None
        if text is None:
            fix = f"export {name} with the path of MemCache's file (kvoffload conf can write it)"
            findings.append(Finding(name, Verdict.WARN, f"{path}: can't be read" if path else "not set", fix))
            continue
        found[name] = parse_conf(text)
        findings.append(Finding(name, Verdict.OK, path))
    if len(found) == 2:
        findings.append(_compare_conf(found["MMC_META_CONFIG_PATH"], found["MMC_LOCAL_CONFIG_PATH"]))
    return findings


def _compare_conf(meta: Mapping[str, str], local: Mapping[str, str]) -> Finding:
    name = "MemCache's files"
    for key in (META_URL, META_STORE):
        if not meta.get(key):
            return Finding(name, Verdict.FAIL, f"the meta file has no {key}", f"add {key} = tcp://HOST:PORT")
    for ours, theirs in ((META_URL, META_URL), (LOCAL_STORE, META_STORE)):
        if local.get(ours) != meta[theirs]:
            shown = f"local {ours} is {local.get(ours, 'missing')}, meta {theirs} is {meta[theirs]}"
            return Finding(name, Verdict.FAIL, shown, f"set {ours} = {meta[theirs]} in the local file")
    if local.get(PROTOCOL) not in PROTOCOLS:
        fix = f"set {PROTOCOL} to device_sdma (A3 with HCCS) or device_rdma (A2, RoCE)"
        return Finding(name, Verdict.FAIL, f"{PROTOCOL} is {local.get(PROTOCOL, 'missing')}", fix)
    return Finding(name, Verdict.OK, "agree")


def examine(machine: Machine) -> list[Finding]:
    """Runs every check, in the order in which a machine is set up."""
    return [
        check_file_version(machine, "NPU driver", DRIVER_INFO, LEAST_DRIVER),
        check_file_version(machine, "CANN", CANN_INFO, LEAST_CANN),
        *check_packages(machine),
        check_copy_kernel(machine),
        check_hugepages(machine),
        check_hash_seed(machine),
        check_ports(machine),
        *check_conf_files(machine),
        check_kernels(machine),
    ]


def print_findings(findings: list[Finding], console: Console) -> None:
    """Prints one row per check, and the fixes of failed ones below."""
    table = Table(box=None)
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(finding.verdict.value, finding.check, finding.found)
    console.print(table)
    for finding in findings:
        if finding.fix:
            console.print(f"{finding.verdict.value}: {finding.check}: {finding.fix}", soft_wrap=True)
