"""Chooses the engine for a request by load in tokens, prefix affinity and health. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_kvoffload.proxy.errors import NoFitError, NoInstanceError
from vllm_kvoffload.proxy.settings import Address

Role = Literal["prefill", "decode"]
FAILURES_TO_EJECT = 3
PROBES_TO_EJECT = 2
COOL_DOWN = 2.0
COOL_DOWN_LIMIT = 30.0
PREFIXES = 16384  # prefix blocks remembered per engine
LAYOUT_SECONDS = 600.0  # lifetime of a known layout: an engine may restart between two probes
PAIR_SECONDS = 60.0  # lifetime of a known mismatch between two engines


class Health:
    """Passive ejection with a doubling cool-down, and results of active probes. Times in seconds."""

    def __init__(self) -> None:
        self.failures = 0
        self.failed_probes = PROBES_TO_EJECT - 1  # a new engine is down after one failed probe
        self.cool_down = COOL_DOWN
        self.ejected_until = float("-inf")
        self.ejections = 0

    @property
    def down(self) -> bool:
        """Whether probes found the engine unreachable."""
        return self.failed_probes >= PROBES_TO_EJECT

    def available(self, now: float) -> bool:
        """Whether requests may be sent there. After a cool-down the next request is the trial."""
        return not self.down and now >= self.ejected_until

    def failed(self, now: float, *, unreachable: bool = False) -> None:
        """Records a failure caused by the engine. ``unreachable``: no connection could be made."""
        self.failures += 1
        if self.failures >= FAILURES_TO_EJECT or unreachable:
            self.failures = max(self.failures, FAILURES_TO_EJECT)  # one more failure ejects it again
            if now >= self.ejected_until:
                self.ejections += 1
                self.ejected_until = now + self.cool_down
                self.cool_down = min(2 * self.cool_down, COOL_DOWN_LIMIT)

    def succeeded(self) -> None:
        """Records an answered request."""
        self.failures = 0
        self.cool_down = COOL_DOWN
        self.ejected_until = float("-inf")

    def probed(self, *, ok: bool) -> None:
        """Records an active probe. A good one does not shorten a cool-down."""
        if ok:
            self.failed_probes = 0
            return
        self.failed_probes += 1
        if self.failed_probes == PROBES_TO_EJECT:
            self.ejections += 1


@dataclass(frozen=True)
class Demand:
    """A request's weight and its prompt's prefix hashes, shortest first."""

    tokens: int
    prefixes: tuple[int, ...] = ()
    tokens_per_prefix: int = 256


class Instance:
    """One engine."""

    def __init__(self, role: Role, address: Address) -> None:
        self.role = role
        self.address = address
        self.health = Health()
        self.load_tokens = 0
        self.requests = 0
        self.draining = False
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._layout = ""
        self._layout_until = float("-inf")
        self.unfit: dict[Address, float] = {}  # mismatching decode engines of a prefill engine, with expiry
        self.proven: set[Address] = set()  # decode engines that received KV from this prefill engine

    @property
    def fits_all(self) -> bool:
        """Whether no recent observation speaks against pairing it with any engine of the other role."""
        return not self.unfit and not self._layout

    def matched_tokens(self, demand: Demand) -> int:
        """Estimates how many of the prompt's tokens are in this engine's prefix cache."""
        count = 0
        for prefix in demand.prefixes:
            if prefix not in self._prefixes:
                break
            count += 1
        return min(count * demand.tokens_per_prefix, demand.tokens)

    def remember(self, demand: Demand) -> None:
        """Records that the engine now caches the request's prefixes."""
        for prefix in demand.prefixes[:PREFIXES]:
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)

    def layout(self, now: float) -> str:
        """Returns the digest of model and KV layout, "" if unknown."""
        return self._layout if now < self._layout_until else ""

    def learn_layout(self, layout: str, until: float) -> None:
        """Stores the engine's digest, as reported by itself or by a decode engine."""
        self._layout, self._layout_until = layout, until

    def restarted(self) -> None:
        """Forgets cache and layout: another process may answer at this address from now on."""
        self._prefixes.clear()
        self._layout_until = float("-inf")
        self.unfit.clear()
        self.proven.clear()


def fits(prefill: Instance, decode: Instance, now: float) -> bool:
    """Whether the two, as far as known, have the same model and KV layout."""
    if prefill.unfit.get(decode.address, float("-inf")) > now:
        return False
    if decode.address in prefill.proven:
        return True  # overrides reports of other decode engines about this prefill engine
    one, other = prefill.layout(now), decode.layout(now)
    return not one or not other or one == other


def mismatched(prefill: Instance, decode: Instance, layout: str, now: float) -> None:
    """Records a refused transfer between the two. ``layout``: the prefill engine's digest, if known."""
    prefill.proven.discard(decode.address)
    if layout:
        prefill.learn_layout(layout, now + LAYOUT_SECONDS)
    if fits(prefill, decode, now):
        prefill.unfit[decode.address] = now + PAIR_SECONDS


class Load:
    """A request's weight on one engine, released at most once."""

    __slots__ = ("_live", "instance", "tokens")

    def __init__(self, instance: Instance, tokens: int) -> None:
        self.instance = instance
        self.tokens = tokens
        self._live = True
        instance.load_tokens += tokens
        instance.requests += 1

    def release(self) -> None:
        """Releases the weight; further calls have no effect."""
        if self._live:
            self._live = False
            self.instance.load_tokens -= self.tokens
            self.instance.requests -= 1


class Pool:
    """The engines of one role."""

    def __init__(self, role: Role, addresses: Iterable[Address]) -> None:
        self.role = role
        self.instances: dict[Address, Instance] = {a: Instance(role, a) for a in addresses}
        self._turn = 0

    def add(self, address: Address) -> Instance:
        """Adds an engine, or reactivates one that is draining."""
        instance = self.instances.setdefault(address, Instance(self.role, address))
        instance.draining = False
        return instance

    def remove(self, address: Address) -> Instance | None:
        """Stops sending requests to an engine; running ones continue."""
        return self.instances.pop(address, None)

    def available(
        self,
        now: float,
        without: Collection[Address] = (),
        accept: Callable[[Instance], bool] | None = None,
    ) -> Sequence[Instance]:
        """Returns the healthy engines, or those merely cooling down if there are none."""
        known = [i for i in self.instances.values() if not i.draining and i.address not in without]
        if accept is not None:
            known = [i for i in known if accept(i)]
        healthy = [i for i in known if i.health.available(now)]
        return healthy or [i for i in known if not i.health.down]

    def acquire(
        self,
        demand: Demand,
        now: float,
        without: Collection[Address] = (),
        accept: Callable[[Instance], bool] | None = None,
    ) -> Load:
        """Reserves the engine expected to finish the request's tokens first; cached ones count as
        finished.

        ``without``: engines that already failed this request, used only as a last resort. ``accept``:
        which engines fit. Raises ``NoInstanceError`` if none is available, ``NoFitError`` if none of those
        fits.
        """
        candidates = self.available(now, without, accept) or self.available(now, (), accept)
        if not candidates:
            raise NoFitError(self.role) if self.available(now) else NoInstanceError(self.role)
        self._turn += 1
        best, best_key = candidates[0], (float("inf"), 0, 0)
        for position, instance in enumerate(candidates):
            matched = instance.matched_tokens(demand)
            cost = instance.load_tokens + demand.tokens - matched
            key = (cost, -matched, (position - self._turn) % len(candidates))  # ties take turns
            if key < best_key:
                best, best_key = instance, key
        best.remember(demand)
        return Load(best, demand.tokens)
