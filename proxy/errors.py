"""How the proxy fails: one exception that carries the HTTP answer."""

from __future__ import annotations

import msgspec

from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.proxy.jsontext import decode_json

JSON = b"application/json"


def error_body(status: int, message: str, kind: str | None = None, param: str | None = None) -> bytes:
    """An error as OpenAI's and vLLM's servers write it."""
    if kind is None:
        kind = "BadRequestError" if status < 500 else "InternalServerError"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def is_error(status: int) -> bool:
    """Whether it is an error's status; engines and what stands before them may send any three digits."""
    return 400 <= status < 600


class HttpFailure(Exception):
    """A request's end: the answer that the client gets, or an event if its stream has begun."""

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
        """A failure of the proxy's own."""
        retry_after = b"1" if status == 503 else None
        return cls(status, error_body(status, message, kind, param), retry_after=retry_after)

    def event(self) -> bytes:
        """The failure as a server-sent event, in one line whatever the engine sent."""
        try:
            value = decode_json(self.body)
        except msgspec.DecodeError:
            value = None
        if not isinstance(value, dict) or "error" not in value:
            text = self.body[:2000].decode(errors="replace")
            value = {"error": {"message": text, "type": "UpstreamError", "param": None, "code": self.status}}
        return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Refused(HttpFailure):
    """A request that this proxy can't serve correctly, refused with 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, error_body(400, message, param=param))


class NoInstanceError(HttpFailure):
    """No engine of a role takes requests."""

    def __init__(self, role: str) -> None:
        super().__init__(
            503, error_body(503, f"no {role} engine is available", "ServiceUnavailable"), retry_after=b"1"
        )


class NoFitError(HttpFailure):
    """There are engines of a role, but none that fits one of the other role."""

    def __init__(self, role: str) -> None:
        message = (
            f"no {role} engine fits: those available have another model or KV layout than the engines of the "
            "other role; GET /health names the pairs"
        )
        super().__init__(503, error_body(503, message, "ServiceUnavailable"), retry_after=b"1")


class UpstreamError(Exception):
    """A transport failure.

    ``sent``: the engine may have seen the request. ``deadline``: it gave no answer in time. ``down``: probes
    found it frozen or gone while it was at work. ``final``: another engine would do the same.
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
    """Decode said why it didn't get a request's KV. ``failure``: ``ReceiveFailure``'s value."""

    type = "KVTransferError"

    def __init__(self, message: str, failure: str) -> None:
        super().__init__(message, sent=True)
        self.failure = failure
