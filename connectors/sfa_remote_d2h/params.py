"""Validates `kv_transfer_params`, which any client may set, into typed values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import Target
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import TPMismatchError, tp_ratio
from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import RendezvousError, check_url
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.hostnames import HostError
from vllm_kvoffload.settings.hosts import HostList
from vllm_kvoffload.settings.remote_d2h import MAX_PORT, external_id

MAX_ID = 256
"""Maximum length of an external request id, which every message about the request contains."""

MAX_TP = 64
"""Maximum tensor-parallel size of a decode engine: one request may make prefill connect to all its ranks."""

_SECRET = re.compile(r"[0-9a-fA-F]{0,64}")


class Refusal(ValueError):
    """The parameters are invalid, with a one-line reason. target: decode engine to notify, if known."""

    def __init__(self, reason: str, target: Target | None = None) -> None:
        super().__init__(reason)
        self.target = target


def request_name(req_id: str) -> str:
    """Returns the id that the other engine uses. Raises Refusal for an id that must not be sent."""
    name = external_id(req_id)
    if not 0 < len(name) <= MAX_ID or not name.isprintable():
        raise Refusal(f"request id {shown(name)}: 1 to {MAX_ID} printable characters are allowed")
    return name


@dataclass(frozen=True)
class ReceiveParams:
    """Decode: the request's KV is to be received from prefill.

    metaserver: URL of the rendezvous, "" where prefill comes by itself (`do_virtual`).
    failures: URL for a failure notice, "" for none.
    refusal: why the request cannot be received, "" if it can.
    """

    metaserver: str = ""
    failures: str = ""
    refusal: str = ""

    @classmethod
    def of(cls, params: object, hosts: HostList) -> ReceiveParams | None:
        """Returns None for a request without `do_remote_prefill`."""
        if not params:
            return None
        if not isinstance(params, Mapping):
            return cls(refusal=f"kv_transfer_params is {shown(params)}, not an object")
        try:
            if not _flag(params, "do_remote_prefill"):
                return None
        except Refusal as refusal:
            return cls(refusal=str(refusal))
        failures = ""
        try:
            if params.get("failures") is not None:
                failures = check_url(params["failures"], hosts)
        except RendezvousError:
            pass  # the request does not depend on it
        try:
            return cls(_metaserver(params, hosts), failures)
        except (Refusal, RendezvousError) as refusal:
            return cls(failures=failures, refusal=str(refusal))


def _metaserver(params: Mapping[str, Any], hosts: HostList) -> str:
    if _flag(params, "do_virtual"):
        return ""
    url = params.get("metaserver")
    if url is None:
        raise Refusal("do_remote_prefill without a metaserver: no prefill engine would hear of the request")
    try:
        return check_url(url, hosts)
    except RendezvousError as error:
        raise Refusal(f"metaserver {error}") from error


@dataclass(frozen=True)
class HandOverParams:
    """Prefill: the request's KV is for a decode engine that already has the first `cached_tokens`."""

    target: Target
    cached_tokens: int

    @classmethod
    def of(cls, params: object, req_id: str, tp_size: int, hosts: HostList) -> HandOverParams | None:
        """Returns None for a request without `do_remote_decode`. tp_size: of this engine. Raises Refusal."""
        if not params:
            return None
        if not isinstance(params, Mapping):
            raise Refusal(f"kv_transfer_params is {shown(params)}, not an object")
        own = _own(params, req_id)
        if not _flag(own, "do_remote_decode"):
            return None
        request_name(req_id)
        target, cached = _target(own, tp_size, hosts), own.get("remote_cached_tokens")
        if type(cached) is not int or cached < 0:
            raise Refusal(f"remote_cached_tokens={shown(cached)}", target)
        return cls(target, cached)


def _own(params: Mapping[str, Any], req_id: str) -> Mapping[str, Any]:
    """Selects the request's own part of the rendezvous: one call may carry several prompts."""
    batch = params.get("batch_kv_transfer_params")
    if batch is None:
        return params
    own = batch.get(external_id(req_id)) if isinstance(batch, Mapping) else None
    if not isinstance(own, Mapping):
        raise Refusal("it is not among the requests of its rendezvous (batch_kv_transfer_params)")
    return own


def _target(params: Mapping[str, Any], tp_size: int, hosts: HostList) -> Target:
    port, decode_tp = params.get("remote_port"), params.get("remote_tp_size")
    if type(port) is not int or type(decode_tp) is not int:
        raise Refusal(f"remote_port={shown(port)}, remote_tp_size={shown(decode_tp)}")
    if not 1 <= decode_tp <= MAX_TP or not 1 <= port <= MAX_PORT - decode_tp + 1:
        raise Refusal(f"remote_port={shown(port)} with remote_tp_size={shown(decode_tp)}")
    secret = params.get("remote_secret", "")
    if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
        raise Refusal("remote_secret is not up to 64 hex characters")
    try:
        target = Target(hosts.check(params.get("remote_host")), port, decode_tp, secret)
    except HostError as error:
        raise Refusal(f"remote_host: {error}") from error
    for key in ("remote_pcp_size", "remote_dcp_size"):
        size = params.get(key, 1)
        if type(size) is not int or size != 1:
            raise Refusal(f"{key}={shown(size)}: context parallelism is not supported", target)
    try:
        tp_ratio(tp_size, decode_tp)
    except TPMismatchError as error:
        raise Refusal(str(error), target) from error
    return target


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{key}={shown(value)}: it must be true or false")
    return bool(value)
