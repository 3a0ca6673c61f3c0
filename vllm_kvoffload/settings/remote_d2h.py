"""Options of ``SfaRemoteD2HConnector``: `kv_connector_extra_config` of prefill and decode engines."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvoffload.settings.connectors import EXTRA, REMOTE_D2H
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.hosts import HostList
from vllm_kvoffload.settings.offload import (
    SECTION,
    EngineFacts,
    SparseOffloadConfig,
    check_parallelism,
)
from vllm_kvoffload.settings.values import check_bool, check_number, check_one_of, refuse_unknown_keys

TRANSFER_BACKENDS = ("memfabric", "nixl")
PROTOCOL = "memfabric_transfer_protocol"
PROTOCOLS = ("sdma", "device_rdma", "device_urma")
"""How MemFabric's reads go: over HCCS within A3's domain, over RoCE, and over UB (950 series)."""
EXTERNAL_ID_SUFFIX = 9
"""vLLM appends "-" and 8 random characters to the id used by the front end and the proxy."""


@dataclass(frozen=True)
class RemoteD2HLimits:
    """Deadlines and budgets, in seconds. Only `lease_s` and `request_s` can be set; the others follow.

    lease_s: how long prefill keeps blocks without a heartbeat, and decode waits for a heartbeat's answer.
    request_s: maximum time from allocation on decode to the end of the transfer.
    retries: further transfers of a request after the first. read_retries: of a transfer's failed reads.
    """

    lease_s: float = 15.0
    request_s: float = 600.0
    retries: int = 2
    read_retries: int = 2

    @property
    def beat_s(self) -> float:
        """Interval between heartbeats."""
        return self.lease_s / 5

    @property
    def early_s(self) -> float:
        """Time for which a transfer of a request unknown to this rank (yet, or any more) is kept."""
        return self.lease_s

    @property
    def offer_s(self) -> float:
        """Time for which a request waits for prefill to begin; prefill may have a queue."""
        return self.request_s

    @property
    def retry_s(self) -> float:
        """Time for which a request whose transfer failed waits for another one."""
        return self.lease_s


@dataclass(frozen=True)
class RemoteD2HConfig:
    """Options of one engine.

    metaserver_hosts: hosts that decode may post to. decode_hosts: hosts that prefill may connect to.
    control_key: 64 hex characters that both sides share; None leaves control messages readable.
    protocol: of MemFabric's reads, the same on both sides.
    """

    transfer_backend: str
    producer: bool
    kv_port: int
    metaserver_hosts: HostList
    decode_hosts: HostList
    control_key: str | None = field(repr=False)
    use_layerwise: bool = True
    limits: RemoteD2HLimits = RemoteD2HLimits()
    protocol: str = PROTOCOLS[0]


def parse_remote_d2h(
    kv_role: str | None,
    kv_port: int,
    extra: Mapping[str, Any],
    device: str,
    configured: Iterable[object] = (),
) -> RemoteD2HConfig:
    """Reads the options out of vLLM's kv-transfer config.

    Args:
        device: "cpu" or "npu"; determines the transfer engine.
        configured: hosts named elsewhere in the engine's configuration; default of both host lists.

    Raises:
        ConfigError: naming the key.
    """
    refuse_unknown_keys(EXTRA, extra, _KEYS)
    if kv_role not in ("kv_producer", "kv_consumer"):
        rule = "an engine either prefills or decodes with this connector"
        raise ConfigError("kv_role", kv_role, rule, "set kv_producer for prefill, kv_consumer for decode")
    defaults = RemoteD2HLimits()
    return RemoteD2HConfig(
        transfer_backend=_backend(extra.get("transfer_backend"), device),
        producer=kv_role == "kv_producer",
        kv_port=kv_port,
        use_layerwise=_bool(extra, "use_layerwise", True),
        limits=RemoteD2HLimits(
            lease_s=_seconds(extra, "lease_s", defaults.lease_s),
            request_s=_seconds(extra, "request_s", defaults.request_s),
        ),
        metaserver_hosts=_hosts(extra, "metaserver_hosts", configured),
        decode_hosts=_hosts(extra, "decode_hosts", configured),
        control_key=read_control_key(extra.get("control_key_file")),
        protocol=_protocol(extra, device),
    )


_KEYS = (
    "transfer_backend", "use_layerwise", "lease_s", "request_s", "metaserver_hosts", "decode_hosts",
    "control_key_file", PROTOCOL,
)  # fmt: skip


def _backend(value: object, device: str) -> str:
    key, expected = f"{EXTRA}.transfer_backend", "memfabric" if device == "npu" else "nixl"
    if value is None:
        raise ConfigError(key, None, "required on both sides", f'set it to "{expected}"')
    if value not in TRANSFER_BACKENDS:
        raise ConfigError(
            key, value, f"must be one of {', '.join(TRANSFER_BACKENDS)}", f'set it to "{expected}"'
        )
    if value != expected:
        raise ConfigError(key, value, f"does not work on {device}", f'set it to "{expected}"')
    return expected


def _protocol(extra: Mapping[str, Any], device: str) -> str:
    value, key = extra.get(PROTOCOL, PROTOCOLS[0]), f"{EXTRA}.{PROTOCOL}"
    if device != "npu" and PROTOCOL in extra:
        raise ConfigError(
            key, value, f"does not work on {device}, where MemFabric isn't used", "leave it out"
        )
    return check_one_of(key, value, choices=PROTOCOLS, default=PROTOCOLS[0])


def _bool(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    return check_bool(f"{EXTRA}.{key}", extra.get(key, default))


def _seconds(extra: Mapping[str, Any], key: str, default: float) -> float:
    rule, fix = "must be seconds from 0.5 to 86400", f"set it to {default:g}"
    return check_number(f"{EXTRA}.{key}", extra.get(key, default), rule, low=0.5, high=86400, fix=fix)


def _hosts(extra: Mapping[str, Any], key: str, configured: Iterable[object]) -> HostList:
    if key not in extra:
        return HostList.default(f"{EXTRA}.{key}", configured)
    return HostList.parse(f"{EXTRA}.{key}", extra[key])


CONTROL_KEY_CHARACTERS = 64
_MAKE_KEY = "make one with `kvoffload control-key FILE`, and give both sides a copy of it"


def read_control_key(path: object) -> str | None:
    """Reads the key from a file readable by its owner only; None without a path. Raises ConfigError."""
    key = f"{EXTRA}.control_key_file"
    if path is None:
        return None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(key, path, "must be the path of a file", _MAKE_KEY)
    try:
        # Without O_NONBLOCK a named pipe would block the start-up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(key, path, f"can't be read: {error.strerror}", _MAKE_KEY) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(key, path, "is no file", _MAKE_KEY)
        if found.st_mode & 0o077:
            rule = f"others may read or change it (mode {stat.S_IMODE(found.st_mode):04o})"
            raise ConfigError(key, path, rule, f"chmod 600 {path}")
        text = os.read(descriptor, CONTROL_KEY_CHARACTERS + 3).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not re.fullmatch(rf"[0-9a-fA-F]{{{CONTROL_KEY_CHARACTERS}}}", text):
        raise ConfigError(key, path, f"must hold {CONTROL_KEY_CHARACTERS} hex characters", _MAKE_KEY)
    return text.lower()


def external_id(req_id: str) -> str:
    """The request id used by the front end, the proxy and the other engine."""
    return req_id[:-EXTERNAL_ID_SUFFIX] if len(req_id) > EXTERNAL_ID_SUFFIX else req_id


MAX_PORT = 65535


def control_port(base: int, dp_rank: int, tp_size: int, tp_rank: int) -> int:
    """Port on which a decode rank listens."""
    return base + dp_rank * tp_size + tp_rank


def check_ports(base: int, dp_size: int, tp_size: int) -> None:
    """Raises ConfigError unless all ports of a decode deployment are ports."""
    last = control_port(base, dp_size - 1, tp_size, tp_size - 1)
    if not 1 <= base <= last <= MAX_PORT:
        rule = (
            f"control ports {base}..{last}, one for each of {dp_size} x {tp_size} ranks, are not in 1..65535"
        )
        raise ConfigError("kv_port", base, rule, f"set it to at most {MAX_PORT - dp_size * tp_size + 1}")


def validate_remote_d2h(options: RemoteD2HConfig, offload: SparseOffloadConfig, facts: EngineFacts) -> None:
    """Checks the options against the model and the engine. Raises ConfigError."""
    if facts.index_topk is None:
        rule = "the model has no sparse attention indexer"
        raise ConfigError("kv_transfer_config.kv_connector", REMOTE_D2H, rule, "serve a DSA model")
    # Ranks that hold some layers or some tokens only would each be refused by decode, when they meet.
    check_parallelism(facts, REMOTE_D2H)
    if options.producer:
        return
    check_ports(options.kv_port, facts.data_parallel_size, facts.tensor_parallel_size)
    if not offload.enabled:
        rule = f"{REMOTE_D2H} pulls into the host pool of the sparse decode offload"
        raise ConfigError(f"{SECTION}.enabled", False, rule, "set it to true on the decode engine")
    if offload.keep_device_kv_cache:
        rule = f"{REMOTE_D2H} does not fill the device KV cache"
        raise ConfigError(f"{SECTION}.keep_device_kv_cache", True, rule, "set it to false")
