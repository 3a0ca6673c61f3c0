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

from vllm_kvoffload.memory.numa import allowed_nodes
from vllm_kvoffload.platforms.ascend.memfabric_kernels import EXTEND, UPGRADE, find_kernels, how_to_build
from vllm_kvoffload.platforms.ascend.operators import BUILD, KERNELS_ENV, library_path
from vllm_kvoffload.platforms.ascend.symbols import OLDEST, RELEASE, TOO_NEW
from vllm_kvoffload.platforms.foreign import ASCEND_PLUGIN, GENERAL, METRICS, PLUGINS, core_problem

LEAST_DRIVER = (25, 5, 1)
LEAST_CANN = (9, 1, 0)
"""What vllm-ascend 0.23.0 and its post release are built and tested with."""
HUGE_KIB = 390 << 20
"""Of huge pages, for the host pool of an engine as in docs/ascend.md, in KiB."""
VLLM = (0, 23)
MEMFABRIC, MEMFABRIC_TOO_NEW = (1, 2), (1, 4)
"""Releases of MemFabric, and of MemCache beside it, whose names and signatures were compared."""
IMAGE = (
    f"use vllm-ascend's image of v{RELEASE}, see docs/ascend.md: pip can't resolve vllm beside vllm-ascend"
)
DRIVER_INFO = ("usr/local/Ascend/driver/version.info", "var/driver/version.info")
CANN_INFO = (
    "usr/local/Ascend/cann/compiler/version.info",
    "usr/local/Ascend/ascend-toolkit/latest/compiler/version.info",
    "usr/local/Ascend/ascend-toolkit/latest/runtime/version.info",
)
META_URL, META_STORE = "ock.mmc.meta_service_url", "ock.mmc.meta_service.config_store_url"
LOCAL_STORE, PROTOCOL = "ock.mmc.local_service.config_store_url", "ock.mmc.local_service.protocol"
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
    installed package, None if it is not installed. needs: this package's requirements. core: why its C++ core
    does not load, "" if it does.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] | None = None
    ports: range = range(0)
    version: Callable[[str], str | None] | None = None
    folder: Callable[[str], Path | None] | None = None
    free: Callable[[int], bool] | None = None
    needs: Callable[[], list[str]] | None = None
    core: Callable[[], str] | None = None

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
    fix = f"install {what} {dotted(least)} or later (CANN: vllm-ascend's image has it)"
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

    def fits(version: tuple[int, ...]) -> bool:
        return MEMFABRIC <= version[:2] < MEMFABRIC_TOO_NEW

    found = [
        check_package(machine, "vllm", lambda version: version[:2] == VLLM, IMAGE),
        check_package(
            machine, "vllm-ascend", lambda version: version >= OLDEST and version[:2] < TOO_NEW, IMAGE
        ),
        check_package(machine, "memfabric_hybrid", fits, f"P/D and the host pool need 1.2 or 1.3: {UPGRADE}"),
        check_package(
            machine,
            "memcache_hybrid",
            fits,
            f"a KV store of many prefill engines needs 1.2 or 1.3: {UPGRADE}",
            Verdict.WARN,
        ),
    ]
    fabric, cache = (
        numbers(machine.installed(f"{name}_hybrid") or "")[:2] for name in ("memfabric", "memcache")
    )
    if fabric and cache and fabric != cache and all(finding.verdict is Verdict.OK for finding in found[2:]):
        shown = f"memfabric_hybrid {dotted(fabric)} beside memcache_hybrid {dotted(cache)}"
        found.append(
            Finding("MemCache's MemFabric", Verdict.FAIL, shown, f"install both of one release: {UPGRADE}")
        )
    return found


def check_own_parts(machine: Machine) -> list[Finding]:
    """Checks what `pip install --no-deps` leaves unchecked: the requirements, and that the C++ core loads."""
    missing = []
    for line in (machine.needs or own_requirements)():
        requirement = line.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", requirement)[0]
        least, found = numbers(requirement.partition(">=")[2] + ".0"), machine.installed(name)
        if "extra" not in line.partition(";")[2] and (found is None or numbers(found) < least):
            missing.append(requirement)
    verdict = Verdict.FAIL if missing else Verdict.OK
    quoted = " ".join(f"'{name}'" for name in missing)
    fix = f"pip install --no-deps {quoted}" if missing else ""
    shown = f"missing or too old: {', '.join(missing)}" if missing else "there"
    core = (machine.core or _core)()
    again = "install vllm-kvoffload again, from a source tree built on this machine with this Python"
    return [
        Finding("dependencies", verdict, shown, fix),
        Finding("C++ core", Verdict.FAIL if core else Verdict.OK, core or "loads", again if core else ""),
    ]


def own_requirements() -> list[str]:
    return metadata.requires("vllm-kvoffload") or []


def _core() -> str:
    problem = core_problem()
    return "" if problem is None else problem.rule


def check_plugins(machine: Machine) -> Finding:
    """Checks variables with which vLLM leaves our plugins or vllm-ascend's out, without a word."""
    device, listed = machine.variable("VLLM_TARGET_DEVICE"), machine.variable(PLUGINS)
    if device not in ("", "empty", "npu"):
        fix = "unset VLLM_TARGET_DEVICE: with cpu vLLM takes its own platform, and the offload is refused"
        return Finding("plugins", Verdict.FAIL, f"VLLM_TARGET_DEVICE is {device}", fix)
    absent = [name for name in (GENERAL, METRICS, ASCEND_PLUGIN) if listed and name not in listed.split(",")]
    if absent:
        fix = f"add {','.join(absent)} to {PLUGINS}, and vllm-ascend's other plugins, or unset it"
        verdict = Verdict.WARN if absent == [METRICS] else Verdict.FAIL
        return Finding("plugins", verdict, f"{PLUGINS} leaves out {', '.join(absent)}", fix)
    return Finding("plugins", Verdict.OK, "all are loaded")


def check_copy_kernel(machine: Machine) -> Finding:
    """Checks MemFabric's copy kernels, which its packages lack."""
    name, version = "MemFabric's kernels", machine.installed("memfabric_hybrid")
    if version is None:
        return Finding(name, Verdict.FAIL, "MemFabric is not installed", UPGRADE)
    release, path = numbers(version), machine.variable(EXTEND)
    folder = (machine.folder or package_folder)("memfabric_hybrid")
    built = find_kernels(folder, release, str(machine.root / path.lstrip("/")) if path else "")
    if built is not None:
        return Finding(name, Verdict.OK, str(built))
    fix = (
        f"decode with P/D needs them, and an aggregated engine does without, slowly: {how_to_build(release)}"
    )
    return Finding(name, Verdict.FAIL, "not built", fix)


def check_hugepages(machine: Machine) -> Finding:
    """Checks that there are as many as host pools need; their size depends on the kernel's page size."""
    pages = int((machine.read("proc/sys/vm/nr_hugepages") or "0").strip() or 0)
    size = re.search(r"^Hugepagesize:\s*(\d+) kB", machine.read("proc/meminfo") or "", re.MULTILINE)
    kib = int(size[1]) if size else 2048
    good = pages * kib >= HUGE_KIB
    wanted, per_gib = -(-HUGE_KIB // kib), (1 << 20) / kib
    fix = (
        f"as root, on each host: echo PAGES > /proc/sys/vm/nr_hugepages, with {per_gib:g} for each GiB of "
        f"host pools and of MemCache's DRAM, and some more; {wanted} are {HUGE_KIB >> 20} GiB"
    )
    shown = f"{pages} of {kib >> 10} MiB"
    return Finding("huge pages", Verdict.OK if good else Verdict.WARN, shown, "" if good else fix)


def check_kernel(machine: Machine) -> Finding:
    """Checks what the kernel must do to map ordinary memory for devices, and to reserve addresses."""
    release = machine.read("proc/sys/kernel/osrelease") or ""
    if numbers(release)[:2] <= (5, 10):
        fix = (
            "use a kernel later than 5.10: aclrtHostRegister maps ordinary memory for a device with those "
            "only, which a host pool in a shared-memory segment needs. MemFabric makes memory of its own"
        )
        return Finding("kernel", Verdict.WARN, release.strip() or "unknown", fix)
    if (machine.read("proc/sys/vm/overcommit_memory") or "").strip() == "2":
        fix = (
            "echo 0 > /proc/sys/vm/overcommit_memory: MemFabric reserves addresses for the pool in each "
            "rank, ranks x size in all"
        )
        return Finding("kernel", Verdict.WARN, "vm.overcommit_memory is 2", fix)
    return Finding("kernel", Verdict.OK, release.strip())


def check_numa(machine: Machine) -> Finding:
    """Checks that a process may spread its pages over all NUMA nodes of the machine."""
    online = (machine.read("sys/devices/system/node/online") or "0").strip()
    allowed = allowed_nodes(machine.read("proc/self/status") or "")
    nodes = allowed_nodes(f"Mems_allowed_list:\t{online}\n")
    absent = sorted(set(nodes) - set(allowed)) if allowed else []
    if absent:
        shown = f"memory of node {', '.join(map(str, absent))} may not be taken"
        fix = "allow all of them (cpuset.mems; docker --cpuset-mems): all devices read the host pool"
        return Finding("NUMA nodes", Verdict.WARN, shown, fix)
    return Finding("NUMA nodes", Verdict.OK, f"{len(nodes)}, all allowed")


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
    given = machine.variable(KERNELS_ENV)
    path = given or library_path(machine.environ or {})
    if path and (machine.root / path.lstrip("/") if given else Path(path)).is_file():
        return Finding("AscendC operators", Verdict.OK, path)
    found = f"{path}: no such file" if path else "not built: plans are made on the host"
    fix = f"unset {KERNELS_ENV} and {BUILD}" if path else BUILD
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
        *check_own_parts(machine),
        check_plugins(machine),
        check_copy_kernel(machine),
        check_hugepages(machine),
        check_kernel(machine),
        check_numa(machine),
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
