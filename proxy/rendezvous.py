"""The rendezvous of decode and prefill through ``/v1/metaserver``. No I/O.

A decode engine with room for a request's KV posts its address. The proxy generated the request's
unguessable id and knows which posts to expect; nothing else can start a prefill. A post is answered when
its own request's prefill has ended, as vLLM-Ascend's connector expects; it never waits for other posts, of
which an engine has only a few at a time.
"""

from __future__ import annotations

import functools
import os
import re
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_kvoffload.hostnames import HostError, canonical_host
from vllm_kvoffload.proxy.errors import RequestRefused

Kind = Literal["completion", "chat"]
Message = dict[str, Any]
Outcome = Future[str]  # of a prefill: empty, or an error
Start = Callable[[Message], Outcome]
DIGEST = re.compile(r"[0-9a-fA-F]{1,128}")
REASON_LIMIT = 2000  # characters of a notice's sentence shown to the client

# Field -> accepted types; other fields are passed on to prefill unchanged.
REQUIRED: dict[str, tuple[type, ...]] = {
    "request_id": (str,),
    "remote_engine_id": (str,),
    "remote_host": (str,),
    "remote_port": (int,),
    "remote_cached_tokens": (int,),
}
OPTIONAL: dict[str, tuple[type, ...]] = {
    "do_remote_prefill": (bool,),
    "do_remote_decode": (bool,),
    "remote_tp_size": (int, str),
    "remote_pcp_size": (int, str),
    "remote_dcp_size": (int, str),
    "remote_secret": (str,),
    "remote_layout": (str,),
}


def new_parent() -> str:
    """Returns a random value for ``X-Request-Id``, so that no two requests collide."""
    return os.urandom(16).hex()


def external_id(kind: Kind, parent: str) -> str:
    """Returns the id that vLLM gives the only prompt of the request ``parent``."""
    return f"chatcmpl-{parent}" if kind == "chat" else f"cmpl-{parent}-0"


def decode_params(metaserver: str, failures: str) -> dict[str, Any]:
    """Returns ``kv_transfer_params`` of the decode request."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": metaserver,
        "failures": failures,
    }


def digest_of(value: object) -> str:
    """Validates a layout digest sent by an engine; returns "" if it is invalid."""
    return value.lower() if isinstance(value, str) and DIGEST.fullmatch(value) else ""


@dataclass(frozen=True)
class Notice:
    """Why decode ended a receive. ``failure``: value of ``ReceiveFailure``."""

    failure: str
    error: str
    prefill_layout: str = ""


def check_notice(message: object) -> tuple[str, Notice]:
    """Returns the request's id and the notice. Raises ``RequestRefused``."""
    if not isinstance(message, dict):
        raise RequestRefused("a JSON object was expected")
    for name in ("request_id", "error", "failure"):
        if not isinstance(message.get(name), str):
            raise RequestRefused(f"{name} must be a string", name)
    layout = digest_of(message.get("prefill_layout"))
    return message["request_id"], Notice(message["failure"], message["error"][:REASON_LIMIT], layout)


@functools.lru_cache(256)  # few engines, each in every request
def _check_host(host: str) -> None:
    try:
        canonical_host(host, scope=True)
    except HostError as error:
        raise RequestRefused(f"remote_host: {error}", "remote_host") from error


def check_message(message: object) -> Message:
    """Validates a post for prefill. Raises ``RequestRefused`` for missing fields and wrong types."""
    if not isinstance(message, dict):
        raise RequestRefused("a JSON object was expected")
    for table, needed in ((REQUIRED, True), (OPTIONAL, False)):
        for name, types in table.items():
            value = message.get(name)
            if type(value) in types or (value is None and not needed):
                continue
            boolean = isinstance(value, bool) and bool not in types  # bool is an int in Python
            if boolean or not isinstance(value, types):
                expected = " or ".join(t.__name__ for t in types)
                raise RequestRefused(f"{name} must be {expected}, found {type(value).__name__}", name)
    _check_host(message["remote_host"])
    if not 0 < message["remote_port"] < 65536:
        raise RequestRefused(f"remote_port {message['remote_port']} is no port", "remote_port")
    if message["remote_cached_tokens"] < 0:
        raise RequestRefused("remote_cached_tokens is negative", "remote_cached_tokens")
    if message.get("do_remote_prefill") or message.get("do_remote_decode") is False:
        raise RequestRefused("do_remote_prefill must be false and do_remote_decode true", "do_remote_prefill")
    made = dict(message)
    made["do_remote_prefill"], made["do_remote_decode"] = False, True
    return made


class PendingRendezvous:
    """The expected posts, by external id."""

    def __init__(self) -> None:
        self._waiting: dict[str, Start | Outcome] = {}
        self._notified: dict[str, Callable[[Notice], None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, request_id: str, start: Start, failed: Callable[[Notice], None]) -> None:
        """Registers a request: the first valid post calls ``start``, once; notices call ``failed``."""
        if request_id in self._waiting:
            raise ValueError(f"{request_id} is expected already")
        self._waiting[request_id] = start
        self._notified[request_id] = failed

    def forget(self, request_id: str) -> None:
        """Unregisters ``request_id``: its posts are unknown from now on."""
        self._waiting.pop(request_id, None)
        self._notified.pop(request_id, None)

    def failed(self, message: object) -> Notice | None:
        """Handles decode's notice; returns None for an unknown id. Raises ``RequestRefused`` for an invalid
        message."""
        request_id, notice = check_notice(message)
        on_notice = self._notified.get(request_id)
        if on_notice is None:
            return None
        on_notice(notice)
        return notice

    def post(self, message: object) -> tuple[Literal["started", "repeated", "unknown"], Outcome | None]:
        """Handles one post. Raises ``RequestRefused`` for an invalid message, but only of a known request.

        An engine repeats a post whose answer it did not get; a repeat starts nothing and shares the
        outcome.
        """
        request_id = message.get("request_id") if isinstance(message, dict) else None
        if not isinstance(request_id, str) or request_id not in self._waiting:
            return "unknown", None
        expected = self._waiting[request_id]
        if isinstance(expected, Future):
            return "repeated", expected
        outcome = expected(check_message(message))
        self._waiting[request_id] = outcome
        return "started", outcome
