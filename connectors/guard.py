"""A request's own data never takes the engine down: hooks keep what goes wrong with one to that request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.log import QuietLog

_Result = TypeVar("_Result")


class RequestGuard:
    """Runs what hooks do for one request. Errors are logged with a traceback, each kind once in a while."""

    def __init__(self) -> None:
        self._log = QuietLog(__name__)

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
            what = f"{hook} failed with {type(error).__name__}"
            self._log.exception(what, f"{what} for request {shown(req_id)}; only this request ends")
            return failed(what)
