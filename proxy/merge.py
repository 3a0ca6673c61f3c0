"""Merges the sub-requests' answers into one: prompt lists and ``n`` choices. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvoffload.proxy import sse
from vllm_kvoffload.proxy.calls import SubRequest
from vllm_kvoffload.proxy.recompute import Identity, choices_of
from vllm_kvoffload.proxy.usage import Usage, add_usage


def _usage(answer: Mapping[str, Any]) -> Usage:
    usage = answer.get("usage")
    return usage if isinstance(usage, dict) else {}


def merged_answer(sub_requests: Sequence[SubRequest], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges unstreamed answers; ``answers`` in the order of ``sub_requests``."""
    made = dict(answers[0])
    choices = []
    for sub_request, answer in zip(sub_requests, answers, strict=True):
        choices += [{**choice, "index": sub_request.index} for choice in choices_of(answer)]
    made["choices"] = choices
    parts = [(_usage(a), c.counts_prompt) for c, a in zip(sub_requests, answers, strict=True)]
    if any(usage for usage, _ in parts):
        made["usage"] = add_usage(parts)
    made.pop("kv_transfer_params", None)
    return made


class StreamMerger:
    """Merges the events of several sub-requests into one stream."""

    def __init__(self) -> None:
        self.identity = Identity()
        self._usage: dict[int, tuple[Usage, bool]] = {}
        self._shape: dict[str, Any] = {}

    def events(self, sub_request: SubRequest, data: bytes) -> bytes:
        """Converts a sub-request's whole events for the client. Usage and ``[DONE]`` wait for :meth:`end`."""
        made = []
        for payload in sse.payloads(data):
            event = sse.parse(payload)
            if event is None:
                continue
            self.identity.learn(event)
            event.update(self.identity.fields)
            usage = event.get("usage")
            if isinstance(usage, dict):
                self._usage[sub_request.index] = (usage, sub_request.counts_prompt)
                event["usage"] = add_usage(self._usage.values())  # so far, as in continuous usage
                if not event.get("choices"):
                    self._shape = event
                    continue
            for choice in choices_of(event):
                choice["index"] = sub_request.index
            made.append(sse.event(event))
        return b"".join(made)

    def end(self) -> bytes:
        """Returns the stream's end, with the sum of usage if sub-requests reported theirs."""
        if not self._shape:
            return sse.DONE_EVENT
        return sse.event({**self._shape, "usage": add_usage(self._usage.values())}) + sse.DONE_EVENT
