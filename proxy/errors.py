"""Errors of the proxy: one exception that carries the HTTP answer."""

from __future__ import annotations

import msgspec

from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.proxy.jsontext import decode_json

JSON = b"application/json"


def error_body(status: int, message: str, kind: str | None = None, param: str | None = None) -> bytes:
    """Formats an error as OpenAI's and vLLM's servers do."""
    if kind is None:
        kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def is_error(status: int) -> bool:
    """Whether a status means an error; engines and their gateways may send any three digits."""
    return 400 <= status < 600


class HttpFailure(Exception):
    """Ends a request: the answer for the client, or an error event if its stream has begun."""

    def __init__(
        self, status: int, body: bytes, content_type: bytes = JSON, retry_after: bytes | None = None
    ) -> None:
        super().__init__(f"{status}: {printable(body[:200].decode(errors='replace'))}")
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after = retry_after

    @classmethod
    def of(
        cls, status: int, message: str, *, kind: str | None = None, param: str | None = None
    ) -> HttpFailure:
        """Creates a failure raised by the proxy itself."""
        retry_after = b"1" if status == 503 else None
        return cls(status, error_body(status, message, kind, param), retry_after=retry_after)

    def event(self) -> bytes:
        """Formats the failure as a server-sent event, on one line whatever the engine sent."""
        try:
            value = decode_json(self.body)
        except msgspec.DecodeError:
            value = None
        if not isinstance(value, dict) or "error" not in value:
            text = self.body[:2000].decode(errors="replace")
            value = {"error": {"message": text, "type": "UpstreamError", "param": None, "code": self.status}}
        return b"data: " + msgspec.json.encode(value) + b"\n\n"


class RequestRefused(HttpFailure):
    """The proxy cannot serve this request correctly (status 400)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, error_body(400, message, param=param))


class NoInstanceError(HttpFailure):
    """No engine of a role is available."""

    def __init__(self, role: str) -> None:
        super().__init__(
            503, error_body(503, f"no {role} engine is available", "ServiceUnavailable"), retry_after=b"1"
        )


class NoFitError(HttpFailure):
    """No available engine of a role fits one of the other role."""

    def __init__(self, role: str) -> None:
        message = (
            f"no {role} engine fits: those available have another model or KV layout than the engines of the "
            "other role; GET /health names the pairs"
        )
        super().__init__(503, error_body(503, message, "ServiceUnavailable"), retry_after=b"1")


class UpstreamError(Exception):
    """A transport failure.

    ``sent``: the engine may have seen the request. ``deadline``: no answer in time. ``down``: probes found
    the engine frozen or gone during the request. ``final``: another engine would fail the same way.
    """

    status = 502
    type = "UpstreamError"

    def __init__(
        self, message: str, *, sent: bool, deadline: bool = False, down: bool = False, final: bool = False
    ) -> None:
        super().__init__(printable(message))
        self.sent = sent
        self.deadline = deadline
        self.down = down
        self.final = final


class ReceiveError(UpstreamError):
    """Decode reported why it did not receive a request's KV. ``failure``: value of ``ReceiveFailure``."""

    type = "KVTransferError"

    def __init__(self, message: str, failure: str) -> None:
        super().__init__(message, sent=True)
        self.failure = failure
