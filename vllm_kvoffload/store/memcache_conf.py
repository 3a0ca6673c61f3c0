"""MemCache's two configuration files: renders them for a cluster, reads and checks them.

mmc-meta.conf configures the MetaService, mmc-local.conf every engine process. Both consist of lines
``key = value``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_kvoffload.hostnames import HostError, canonical_host, ip_address
from vllm_kvoffload.settings.errors import ConfigError

META_FILE, LOCAL_FILE = "mmc-meta.conf", "mmc-local.conf"
META_VARIABLE, LOCAL_VARIABLE = "MMC_META_CONFIG_PATH", "MMC_LOCAL_CONFIG_PATH"
PROTOCOLS = ("device_sdma", "device_rdma", "host_shm", "host_tcp")
MAX_WORLD_SIZE = 1024
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40

_META_URL = "ock.mmc.meta_service_url"
_STORE_URL = "ock.mmc.meta_service.config_store_url"
_METRICS_URL = "ock.mmc.meta_service.metrics_url"
_LEASE_TTL = "ock.mmc.meta.lease_ttl_ms"
_LOG_LEVEL = "ock.mmc.log_level"
_LOCAL_STORE_URL = "ock.mmc.local_service.config_store_url"
_WORLD_SIZE = "ock.mmc.local_service.world_size"
_PROTOCOL = "ock.mmc.local_service.protocol"
_DRAM_SIZE = "ock.mmc.local_service.dram.size"
_UNITS = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": TIB}


@dataclass(frozen=True)
class Endpoint:
    """A TCP service."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """URL in MemCache's notation."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class Cluster:
    """Description of a cluster, from which the two files are rendered.

    meta, config_store: the MetaService's two endpoints, as reached by all nodes. metrics: its HTTP endpoint.
    nodes, services_per_node: number of engine processes that contribute memory, one per prefill rank.
    world_size: maximum number of such processes; 0: the current number. dram_size: of each, such as "10GB".
    lease_ttl_ms: duration of MemCache's own leases.
    """

    meta: Endpoint
    config_store: Endpoint
    metrics: Endpoint
    nodes: int = 1
    services_per_node: int = 1
    world_size: int = 0
    protocol: str = "device_sdma"
    dram_size: str = "10GB"
    lease_ttl_ms: int = 30000
    log_level: str = "error"

    @property
    def local_services(self) -> int:
        """Number of engine processes that contribute memory."""
        return self.nodes * self.services_per_node


@dataclass(frozen=True)
class LocalConf:
    """The settings that this project reads from mmc-local.conf."""

    meta: Endpoint
    config_store: Endpoint
    world_size: int
    protocol: str
    dram_bytes: int


def render(cluster: Cluster) -> dict[str, str]:
    """Text of both files, by name. Raises ConfigError: the description is invalid."""
    validate(cluster)
    world_size = cluster.world_size or cluster.local_services
    meta = {
        _META_URL: cluster.meta.url,
        _STORE_URL: cluster.config_store.url,
        _METRICS_URL: cluster.metrics.url.replace("tcp:", "http:"),
        _LEASE_TTL: str(cluster.lease_ttl_ms),
        _LOG_LEVEL: cluster.log_level,
    }
    local = {
        _META_URL: cluster.meta.url,
        _LOCAL_STORE_URL: cluster.config_store.url,
        _LOG_LEVEL: cluster.log_level,
        _WORLD_SIZE: str(world_size),
        _PROTOCOL: cluster.protocol,
        _DRAM_SIZE: cluster.dram_size,
    }
    return {
        name: "".join(f"{key} = {value}\n" for key, value in values.items())
        for name, values in ((META_FILE, meta), (LOCAL_FILE, local))
    }


def validate(cluster: Cluster) -> None:
    """Raises ConfigError for the first rule broken."""
    for key, text in (
        ("meta_host", cluster.meta.host),
        ("config_store_host", cluster.config_store.host),
        ("metrics_host", cluster.metrics.host),
        ("protocol", cluster.protocol),
        ("dram_size", cluster.dram_size),
        ("log_level", cluster.log_level),
    ):
        if not (text.isascii() and text.isprintable()) or text != text.strip():
            rule = "must be printable ASCII on one line, without spaces around it"
            raise ConfigError(key, text, rule, "correct it")
    for key, number, high in (
        ("nodes", cluster.nodes, MAX_WORLD_SIZE),
        ("services_per_node", cluster.services_per_node, MAX_WORLD_SIZE),
        ("lease_ttl_ms", cluster.lease_ttl_ms, 1 << 31),
    ):
        if not 1 <= number <= high:
            raise ConfigError(key, number, f"must be from 1 to {high}", "give the actual number")
    _check_endpoints(cluster)
    _check_protocol(cluster.protocol, cluster.nodes)
    _check_world_size(cluster.world_size or cluster.local_services, cluster.local_services)
    _check_dram(cluster.dram_size, cluster.protocol)
    if cluster.log_level not in ("debug", "info", "warn", "error"):
        raise ConfigError("log_level", cluster.log_level, "must be debug, info, warn or error", "use error")


def _check_endpoints(cluster: Cluster) -> None:
    named = {"meta": cluster.meta, "config_store": cluster.config_store, "metrics": cluster.metrics}
    for key, endpoint in named.items():
        if not 1 <= endpoint.port <= 65535:
            raise ConfigError(f"{key}_port", endpoint.port, "must be from 1 to 65535", "choose a free port")
        _check_host(f"{key}_host", endpoint.host, several_nodes=cluster.nodes > 1 and key != "metrics")
    if len(set(named.values())) < len(named):
        rule = "the MetaService listens on three ports: its own, its config store's and its metrics'"
        raise ConfigError("config_store_port", cluster.config_store.port, rule, "give each another port")


def _check_host(key: str, host: str, *, several_nodes: bool) -> None:
    address = ip_address(host)
    if address is not None and address.is_unspecified:
        rule = "engines connect to this address: it can't stand for all of a machine's"
        raise ConfigError(key, host, rule, "give the address at which the other nodes reach it")
    try:
        name = canonical_host(host)
        if host.startswith("["):
            raise HostError("an IPv6 address is given without brackets here")
    except HostError as error:
        rule = f"must be a host name or an IP address: {error}"
        raise ConfigError(key, host, rule, "name the machine") from None
    local = name == "localhost" if address is None else address.is_loopback
    if local and several_nodes:
        rule = "other nodes can't reach a loopback address"
        raise ConfigError(key, host, rule, "give the address at which the other nodes reach it")


def _check_protocol(protocol: str, nodes: int) -> None:
    if protocol not in PROTOCOLS:
        fix = "device_sdma on A3 with HCCS, device_rdma on A2 and others with RoCE, host_shm on one machine"
        raise ConfigError("protocol", protocol, f"must be one of {', '.join(PROTOCOLS)}", f"use {fix}")
    if protocol == "host_shm" and nodes > 1:
        raise ConfigError("protocol", protocol, f"shared memory does not reach {nodes} nodes", "use host_tcp")


def _check_world_size(world_size: int, services: int) -> None:
    if not services <= world_size <= MAX_WORLD_SIZE:
        rule = f"must be from {services}, the number of local services, to {MAX_WORLD_SIZE}"
        raise ConfigError(
            "world_size", world_size, rule, f"set it to {min(max(services, 1), MAX_WORLD_SIZE)}"
        )


def _check_dram(text: str, protocol: str) -> None:
    size = size_bytes("dram_size", text)
    if not 0 < size <= TIB:
        raise ConfigError("dram_size", text, "must be above 0 and at most 1TB", 'write it as "10GB"')
    if protocol.startswith("device_") and size % GIB:
        whole = int(text) if text.strip().isdigit() and size <= 1024 else -(-size // GIB)  # meant as GB
        fix = f'set it to "{whole}GB"'
        raise ConfigError("dram_size", text, f"must be whole GB with {protocol}", fix)


def size_bytes(key: str, text: str) -> int:
    """Bytes of a size in MemCache's notation: 134217728, 2048KB, 200m, 2.5GB, 1TB. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise ConfigError(key, text, "must be a number with KB, MB, GB or TB", 'write it as "10GB"')
    return int(float(match[1]) * _UNITS[match[2]])


# ---------------------------------------------------------------------------------------------------- reading


def read_conf(key: str, path: Path) -> dict[str, str]:
    """The values of a file, by key. Raises ConfigError: it can't be read, or a line is not a setting."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            key, str(path), f"can't be read: {error}", "write it with kvoffload conf"
        ) from error
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        setting = line.strip()
        if not setting or setting.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not name or not value:
            rule = f"line {number} is not key = value: {setting!r:.60}"
            raise ConfigError(key, str(path), rule, "correct it, or write it anew with kvoffload conf")
        values[name] = value
    return values


def read_local(path: Path) -> LocalConf:
    """Reads mmc-local.conf. Raises ConfigError: missing, or an invalid setting."""
    values = read_conf(LOCAL_VARIABLE, path)
    protocol = _setting(values, _PROTOCOL, path)
    dram = values.get(_DRAM_SIZE, "0")
    return LocalConf(
        meta=_endpoint(values, _META_URL, path),
        config_store=_endpoint(values, _LOCAL_STORE_URL, path),
        world_size=_whole_number(values, _WORLD_SIZE, path),
        protocol=protocol,
        dram_bytes=size_bytes(_DRAM_SIZE, dram),
    )


def read_meta(path: Path) -> tuple[Endpoint, Endpoint]:
    """(MetaService, its config store) of mmc-meta.conf. Raises ConfigError."""
    values = read_conf(META_VARIABLE, path)
    return _endpoint(values, _META_URL, path), _endpoint(values, _STORE_URL, path)


def check_pair(meta_path: Path, local_path: Path, local_services: int = 1) -> LocalConf:
    """Checks that two files match. Raises ConfigError naming the differing setting."""
    meta, config_store = read_meta(meta_path)
    local = read_local(local_path)
    pairs = ((_META_URL, local.meta, meta), (_LOCAL_STORE_URL, local.config_store, config_store))
    for key, found, expected in pairs:
        if found != expected:
            rule = f"{local_path.name} differs from {meta_path.name}, which has {expected.url}"
            raise ConfigError(key, found.url, rule, "both files must name the same endpoints")
    _check_world_size(local.world_size, local_services)
    return local


def _setting(values: Mapping[str, str], key: str, path: Path) -> str:
    if key not in values:
        raise ConfigError(key, None, f"is missing in {path}", "add it, or write the file with kvoffload conf")
    return values[key]


def _whole_number(values: Mapping[str, str], key: str, path: Path) -> int:
    text = _setting(values, key, path)
    if not re.fullmatch("[0-9]{1,15}", text):
        raise ConfigError(key, text, "must be a whole number", f"correct it in {path}")
    return int(text)


def _endpoint(values: Mapping[str, str], key: str, path: Path) -> Endpoint:
    text = _setting(values, key, path)
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:]+\]|[^:/\[\]]+):(\d{1,5})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(key, text, "must be tcp://HOST:PORT", f"correct it in {path}")
    return Endpoint(match[1].strip("[]"), int(match[2]))
