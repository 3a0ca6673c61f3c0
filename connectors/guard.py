"""Confines an exception in one of vLLM's hooks to the request that caused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.log import RateLimitedLog

_Result = TypeVar("_Result")


class RequestGuard:
    """Runs a hook's work for one request. Logs exceptions with traceback, rate-limited by kind."""

    def __init__(self) -> None:
        self._log = RateLimitedLog(__name__)

    def run(
        self,
        req_id: str,
        hook: str,
        work: Callable[[], _Result],
        failed: Callable[[str], _Result],
    ) -> _Result:
        """Returns the result of `work` or, if it raises, the result of `failed` called with a one-line
        reason.

        failed: returns the result that ends the request; must not read the request's data.
        """
        try:
            return work()
        except Exception as error:
            what = f"{hook} failed with {type(error).__name__}"
            self._log.exception(what, f"{what} for request {shown(req_id)}; only this request ends")
            return failed(what)
