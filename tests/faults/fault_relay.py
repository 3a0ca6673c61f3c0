"""Sits between prefill's control sockets and decode's: forwards messages, or alters them.

Prefill reaches it since the rendezvous hop puts its port in the place of decode's. Each prefill session has a
connection of its own to decode, under its own name, as it would have without the relay.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_kvoffload.connectors.sfa_remote_d2h import wire

TICK_S = 0.2
ACTIONS = ("dropped", "delayed", "duplicated", "truncated")


@dataclass(eq=False)
class Rule:
    """Rules for messages. The first matching one decides.

    kinds: names of wire's classes, empty for all. prompt: digest of the request they are about, None for any;
    of a heartbeat only the entries of that request are hit. times: how many messages, None for all.
    chance: share of the messages. hits: messages so far. Without an action a message is passed on.
    """

    action: str
    kinds: tuple[str, ...] = ()
    prompt: bytes | None = None
    times: int | None = 1
    delay_s: float = 0.0
    chance: float = 1.0
    hits: int = 0


@dataclass(eq=False)
class Watch:
    """Calls `act`, once, before the first fitting message is passed on. Runs on the relay's thread."""

    fits: Callable[[Any], bool]
    act: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class Relay:
    """A thread that passes messages between prefill sessions and the decode rank at a port."""

    def __init__(self, decode_port: int) -> None:
        self._decode = f"tcp://127.0.0.1:{decode_port}"
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._prompts: dict[tuple[str, int], bytes] = {}
        self._rules: list[Rule] = []
        self._watches: list[Watch] = []
        self._later: list[tuple[float, int, str, bytes, bytes]] = []
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._thread.join(5)
        self._context.destroy(linger=0)

    def rule(self, action: str, *kinds: str, **more: Any) -> Rule:
        """A rule from now on."""
        made = Rule(action, kinds, **more)
        with self._lock:
            self._rules.append(made)
        return made

    def remove(self, rule: Rule) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._rules.remove(rule)

    def clear(self) -> None:
        """Removes all rules and watches; delayed messages still arrive."""
        with self._lock:
            self._rules.clear()
            self._watches.clear()

    def watch(self, fits: Callable[[Any], bool], act: Callable[[], None]) -> Watch:
        made = Watch(fits, act)
        with self._lock:
            self._watches.append(made)
        return made

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        monitor = self._front.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while not self._stop:
            until = self._later[0][0] - time.monotonic() if self._later else TICK_S
            ready = dict(poller.poll(max(0, 1000 * min(until, TICK_S))))
            if self._front in ready:
                for identity, frame in self._received(self._front):
                    if identity not in self._backs:
                        poller.register(self._connect(identity), zmq.POLLIN)
                    self._handle("decode", identity, frame)
            for identity, back in list(self._backs.items()):
                if back in ready:
                    for (frame,) in self._received(back):
                        self._handle("prefill", identity, frame)
            if monitor in ready:
                recv_monitor_message(monitor)
                # It doesn't say whose connection it was: all are opened again when they are needed.
                for back in self._backs.values():
                    poller.unregister(back)
                    back.close(linger=0)
                self._backs.clear()
            while self._later and self._later[0][0] <= time.monotonic():
                self._send(*heapq.heappop(self._later)[2:])
        self._front.disable_monitor()

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.IDENTITY, identity)
        back.connect(self._decode)
        self._backs[identity] = back
        return back

    @staticmethod
    def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(socket.recv_multipart(flags=zmq.NOBLOCK))
        return messages

    def _send(self, to: str, identity: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            if to == "prefill":
                self._front.send_multipart([identity, frame], flags=zmq.NOBLOCK)
            elif identity in self._backs:
                self._backs[identity].send(frame, flags=zmq.NOBLOCK)

    def _handle(self, to: str, identity: bytes, frame: bytes) -> None:
        try:
            message = wire.decode_to_decode(frame) if to == "decode" else wire.decode_to_prefill(frame)
        except wire.WireError:  # not for the relay to judge
            self._send(to, identity, frame)
            return
        if isinstance(message, wire.Publish):
            self._prompts[message.session, message.transfer] = message.prompt
        with self._lock:
            fitting = [watch for watch in self._watches if watch.fits(message)]
            self._watches = [watch for watch in self._watches if watch not in fitting]
        for watch in fitting:
            watch.act()
            watch.done.set()
        rule, hit, rest = self._choose(message)
        if rule is None:
            self._send(to, identity, frame)
            return
        if rest is not None:
            self._send(to, identity, wire.encode(rest))
        self._disturb(rule, to, identity, wire.encode(hit))

    def _disturb(self, rule: Rule, to: str, identity: bytes, frame: bytes) -> None:
        if rule.action == "delayed":
            delay_s = rule.delay_s if rule.chance == 1.0 else self._random.uniform(0, rule.delay_s)
            due = time.monotonic() + delay_s
            heapq.heappush(self._later, (due, next(self._numbers), to, identity, frame))
        elif rule.action == "duplicated":
            self._send(to, identity, frame)
            self._send(to, identity, frame)
        elif rule.action == "truncated":
            self._send(to, identity, frame[: max(1, len(frame) // 2)])
        else:
            assert rule.action == "dropped"

    def _choose(self, message: Any) -> tuple[Rule | None, Any, Any]:
        """The rule for a message, the part that it hits, and the rest."""
        with self._lock:
            for rule in self._rules:
                if rule.kinds and type(message).__name__ not in rule.kinds:
                    continue
                hit, rest = self._parts(message, rule.prompt)
                if hit is None or (rule.times is not None and rule.hits >= rule.times):
                    continue
                if self._random.random() < rule.chance:
                    rule.hits += 1
                    return rule, hit, rest
        return None, message, None

    def _parts(self, message: Any, prompt: bytes | None) -> tuple[Any, Any]:
        """Splits a message's fields into those about a request and the others."""
        if prompt is None:
            return message, None
        peer = getattr(message, "peer", None)
        session = message.session if peer is None else peer  # prefill's
        if isinstance(message, (wire.Beat, wire.Progress)):
            return _split(message, "entries", lambda entry: self._prompts.get((session, entry[0])) == prompt)
        if isinstance(message, wire.BeatAck):
            return _split(message, "transfers", lambda number: self._prompts.get((session, number)) == prompt)
        number = getattr(message, "transfer", None)
        about = self._prompts.get((session, number)) if number is not None else None
        return (message, None) if about == prompt else (None, message)


def _split(message: Any, name: str, mine: Callable[[Any], bool]) -> tuple[Any, Any]:
    items = getattr(message, name)
    hit = tuple(item for item in items if mine(item))
    rest = tuple(item for item in items if not mine(item))
    made = [msgspec.structs.replace(message, **{name: part}) if part else None for part in (hit, rest)]
    return made[0], made[1]
