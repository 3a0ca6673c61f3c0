"""Admission of prefill sessions on a decode rank, and declines that arrive before their requests. Pure."""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from vllm_kvoffload.connectors.sfa_remote_d2h.facts import differences, digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Declined, Hello

MAX_PEERS = 1024
"""Maximum number of prefill ranks known to a decode rank at a time."""

DECLINES_KEPT = 1024
OVER_KEPT = 4096


class Admission:
    """Admits prefill sessions that know the current secret and have the same model and layout.

    secret: "" until it is known here; until then no session is admitted. facts: see `Layout.facts`.
    """

    def __init__(self, facts: Mapping[str, str], tp_size: int, tp_rank: int) -> None:
        self.secret = ""
        self._facts, self._digest = dict(facts), digest_of(facts)
        self._tp_size, self._tp_rank = tp_size, tp_rank

    def has_secret(self, secret: str) -> bool:
        """Compares with the secret in constant time."""
        return bool(self.secret) and hmac.compare_digest(secret.encode(), self.secret.encode())

    def refusal(self, hello: Hello) -> str:
        """Returns why a session cannot be a peer, "" if it can."""
        if hello.digest != self._digest:
            named = differences(hello.facts, self._facts)
            return f"prefill and decode differ in {named or 'what their digests are made of'}"
        if hello.tp_size < self._tp_size or hello.tp_size % self._tp_size:
            return f"prefill has TP {hello.tp_size}, which is no multiple of decode's {self._tp_size}"
        if hello.tp_rank // (hello.tp_size // self._tp_size) != self._tp_rank:
            return f"prefill rank {hello.tp_rank} does not serve decode rank {self._tp_rank}"
        return ""


def same_rank(known: Hello, hello: Hello) -> bool:
    """Whether two introductions are of the same rank; ignores the secret, which is decode's."""
    return known == msgspec.structs.replace(hello, secret=known.secret)


class Declines:
    """Keeps `Declined` messages that arrived before their requests.

    None is kept for a request that ended here recently: each prefill rank sends one, and a late one must
    not fail the next request of the same name.

    Args:
        keep_s: how long a message is kept, and how long the end of a request is remembered.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._kept: OrderedDict[tuple[str, bytes], tuple[float, Declined]] = OrderedDict()
        self._over: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, now: float, message: Declined) -> None:
        """Keeps a message about an unknown request."""
        key = (message.request, message.prompt)
        if now - self._over.get(key, float("-inf")) >= self._keep_s:
            self._kept.pop(key, None)
            self._kept[key] = (now, message)
        while len(self._kept) > DECLINES_KEPT:
            self._kept.popitem(last=False)

    def take(self, now: float, request: str, prompt: bytes) -> Declined | None:
        """Returns and removes the message kept about a request that has become known, if any."""
        kept = self._kept.pop((request, prompt), None)
        return kept[1] if kept is not None and now - kept[0] < self._keep_s else None

    def over(self, request: str, prompt: bytes) -> None:
        """Records that a request ended, at about the time of the last tick."""
        self._over.pop((request, prompt), None)
        self._over[request, prompt] = self._now
        while len(self._over) > OVER_KEPT:
            self._over.popitem(last=False)

    def forget_old(self, now: float) -> None:
        """Drops expired messages."""
        self._now = now
        while self._kept and now - next(iter(self._kept.values()))[0] >= self._keep_s:
            self._kept.popitem(last=False)
        while self._over and now - next(iter(self._over.values())) >= self._keep_s:
            self._over.popitem(last=False)
