"""A request's own data never takes the engine down: hooks keep what goes wrong with one to that request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from vllm_kvoffload.log import get_logger

logger = get_logger(__name__)

_Result = TypeVar("_Result")

LOGGED_KEPT = 4096
"""Requests remembered so that a hook which is called every step does not log every step."""

SHOWN = 80
"""Longest piece of foreign text in a message."""


class RequestGuard:
    """Runs what hooks do for one request. An error is logged with its traceback, once for each request."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def run(
        self,
        req_id: str,
        hook: str,
        work: Callable[[], _Result],
        failed: Callable[[str], _Result],
    ) -> _Result:
        """What `work` returns, or, when it raises, what `failed` returns for a one-line reason.

        failed: ends the request in its defined way; it uses nothing that the request carries.
        """
        try:
            return work()
        except Exception as error:
            if req_id not in self._logged:
                logger.exception("%s failed for request %s; only this request ends", hook, shown(req_id))
                self._logged[req_id] = None
                if len(self._logged) > LOGGED_KEPT:
                    self._logged.popitem(last=False)
            return failed(f"{hook} failed with {type(error).__name__}")


def shown(value: object) -> str:
    """A foreign value for a message: one line of ASCII, short, whatever it is."""
    if isinstance(value, str):
        text = ascii(value[:SHOWN])
        return text if len(value) <= SHOWN else f"{text}... ({len(value)} characters)"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
