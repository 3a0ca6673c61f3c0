"""Frames of any content against both sides of the protocol: no error, no request beyond its deadline, nothing
that grows. What was once found is in CORPUS.

KVOFFLOAD_FUZZ_FRAMES sets the number of frames, KVOFFLOAD_FUZZ_SEED what they are:
    KVOFFLOAD_FUZZ_FRAMES=10000000 python -m pytest tests/connectors/test_control_fuzz.py --timeout 0
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.connectors.pd_bench import FACTS, HOST, LIMITS, Bench, free_port, make_caches, metadata
from vllm_kvoffload.connectors.sfa_remote_d2h import reads, wire, worker_d, worker_p
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.introductions import DECLINES_KEPT, MAX_PEERS
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Receive
from vllm_kvoffload.transfer import PeerHandle, ReadHandle, TransferEngine, TransferError

FRAMES = int(os.environ.get("KVOFFLOAD_FUZZ_FRAMES", "100000"))
SEED = int(os.environ.get("KVOFFLOAD_FUZZ_SEED", "0"))
BLOCKS, LAYERS = 12, 3
SECRET = "5ec2e7"
SESSIONS = [f"p{n}" for n in range(6)]
STRANGE = [
    -1, 0, 1, 2, 3, 11, 12, 255, 1 << 31, (1 << 31) - 1, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, -(1 << 63), 0.0, -1.5, float("nan"), float("inf"), True, None, "", "x", "\n", "\x00",
    "\u2028", "☃" * 300, b"", b"\xff", b"\xff" * 17, [], [1], [[]], [[[]]], {}, {"a": "b"}, {1: 2},
]  # fmt: skip


def raw(message, **changes):
    """A frame of any fields."""
    fields = [message.__struct_config__.tag, *(getattr(message, f) for f in message.__struct_fields__)]
    for name, value in changes.items():
        fields[1 + message.__struct_fields__.index(name)] = value
    return bytes([wire.VERSION]) + msgspec.msgpack.encode(fields)


class Clock:
    """The workers' time: it passes when the test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Engine(TransferEngine):
    """Reads end some polls later, some with an error. Metadata of strangers must never come here."""

    name = "fuzz"

    def __init__(self, random):
        self.random = random

    def register(self, regions):
        pass

    def local_metadata(self):
        return b"good"

    def add_peer(self, metadata):
        assert not metadata.startswith(b"stranger"), "the transfer engine parses what a stranger sent"
        if metadata != b"good":
            raise TransferError("not an engine's")
        return PeerHandle("peer")

    def remove_peer(self, _peer):
        if self.random.random() < 0.1:
            raise TransferError("it is gone")

    def read(self, _peer, spans):
        if self.random.random() < 0.02:
            raise TransferError("no")
        return ReadHandle(spans.total_bytes - (self.random.random() < 0.02))

    def poll(self, handle):
        if self.random.random() < 0.7:
            handle.finish("broken" if handle.cancelled or self.random.random() < 0.05 else "")
        return handle.status

    def cancel(self, handle):
        handle.cancelled = True

    def close(self):
        pass


class Frames:
    """Frames that are messages, nearly so, or rubbish."""

    def __init__(self, random, sample):
        self.random, self.sample = random, sample
        self.last = deque([b"\x03"], maxlen=64)

    def next(self):
        message = self.sample()
        kind = self.random.random()
        if kind < 0.5:
            frame = wire.encode(message)
        elif kind < 0.8:
            name = self.random.choice(message.__struct_fields__)
            frame = self.changed(message, name)
        else:
            frame = self.damaged(wire.encode(message))
        self.last.append(frame)
        return message, frame

    def changed(self, message, name):
        value, choice = getattr(message, name), self.random.choice
        if isinstance(value, tuple) and value and self.random.random() < 0.6:
            item = list(value[0]) if isinstance(value[0], tuple) else choice(STRANGE)
            if isinstance(value[0], tuple):
                item[self.random.randrange(len(item))] = choice(STRANGE)
            elif isinstance(value[0], wire.Chunk):
                chunk = [value[0].start, list(value[0].blocks), value[0].layers]
                chunk[self.random.randrange(3)] = choice([*STRANGE, [choice(STRANGE)], [1, 1], [2, 1]])
                item = chunk
            value = [*value, item] if self.random.random() < 0.5 else [item]
        else:
            value = choice(STRANGE)
        try:
            return raw(message, **{name: value})
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            return wire.encode(message)

    def damaged(self, frame):
        data, random = bytearray(frame), self.random
        for _ in range(random.randint(1, 4)):
            how, at = random.randrange(5), random.randrange(len(data) + 1)
            if how == 0 and data:
                data[at % len(data)] = random.randrange(256)
            elif how == 1:
                del data[at:]
            elif how == 2:
                data[at:at] = random.randbytes(random.randint(1, 9))
            elif how == 3:
                data[at:] = random.choice(self.last)[at:]
            else:
                data[at:at] = random.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\x91" * 3000]
                )
        return bytes(data)


CACHES = make_caches(torch.zeros)
LAYOUT = Layout.of(CACHES, BLOCKS)


def hello(session, secret=SECRET, **changes):
    base = wire.Hello(
        session, f"engine-{session[:2]}", 1, 0, digest_of(FACTS), BLOCKS, LAYOUT.layers, b"good", 1.0, True,
        secret, FACTS,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


GOOD = wire.Publish("p0", 1, "r0", b"p" * 16, 3, 0, (wire.Chunk(0, (1, 2), 1),), False)
CORPUS = {  # of a peer, to decode
    "block ids of 2^63": raw(GOOD, chunks=[[0, [1 << 63], 1]]),
    "block ids of 2^64 - 1": raw(GOOD, chunks=[[0, [(1 << 64) - 1], 1]]),
    "negative block ids": raw(GOOD, chunks=[[0, [-1], 1]]),
    "a block beyond the cache": raw(GOOD, chunks=[[0, [BLOCKS], 1]]),
    "first of -1": raw(GOOD, first=-1),
    "first beyond": raw(GOOD, first=1000),
    "negative start": raw(GOOD, chunks=[[-5, [1], 1]]),
    "overlapping chunks": raw(GOOD, chunks=[[0, [1, 2], 1], [1, [3], 1]]),
    "a block twice": raw(GOOD, chunks=[[0, [1, 1], 1]]),
    "too many layers": raw(GOOD, chunks=[[0, [1], 99]]),
    "an address of 2^63": raw(hello("p0"), layers=[[0, [[1 << 63, 64, 64]], []]]),
    "a stride of 2^62": raw(hello("p0"), layers=[[0, [[64, (1 << 62) - 1, 64]], []]]),
    "other layers than the digest says": raw(hello("q0"), layers=[[0, [[64, 64, 64]], []]]),
    "an endless lease": raw(hello("p0"), lease_s=float("inf")),
    "a lease of no number": raw(hello("p0"), lease_s=float("nan")),
    "a negative lease": raw(hello("p0"), lease_s=-1.0),
    "TP of 0": raw(hello("p0"), tp_size=0),
    "a rank beyond TP": raw(hello("p0"), tp_rank=7),
    "no blocks": raw(hello("p0"), num_blocks=0),
    "metadata of a stranger": raw(hello("p0", "guessed"), metadata=b"stranger" + b"\xff" * 64),
    "damaged metadata": raw(hello("q1"), metadata=b"\xff" * 64),
    "a forged log line": raw(wire.Closed("p0", 1, "x", False), reason="x\nERROR all is lost"),
    "an old version": b"\x02" + wire.encode(GOOD)[1:],
    "an empty frame": b"",
    "nested": bytes([wire.VERSION]) + b"\x91" * 100_000,
    "announces 4 GiB": bytes([wire.VERSION]) + b"\xdd\xff\xff\xff\xff",
    "other memory for a known session": raw(hello("p0"), metadata=b"other"),
}


class Rig:
    """A worker whose thread never starts: the test is the thread."""

    def __init__(self, monkeypatch, seed):
        self.random, self.clock = random.Random(seed), Clock()
        for module in (worker_d, worker_p, reads):
            monkeypatch.setattr(module, "time", self.clock)
        self.numbers = iter(range(1, 1 << 62))


class DecodeRig(Rig):
    """Decode with requests of its own, and prefill ranks of which some are strangers."""

    def __init__(self, monkeypatch, seed):
        super().__init__(monkeypatch, seed)
        self.worker = worker_d.DecodeWorker(
            Engine(self.random), LAYOUT, FACTS,
            host=HOST, port=free_port(), tp_size=1, tp_rank=0, limits=LIMITS,
        )  # fmt: skip
        monkeypatch.setattr(worker_d, "send", lambda _socket, frames: wire.decode_to_prefill(frames[1]))
        self.worker.use_secret(SECRET)
        self.born: dict[str, float] = {}
        self.fates: dict[str, int] = {"received": 0, "failed": 0}
        self.transfer = 10
        self.frames = Frames(self.random, self.sample)

    def sample(self):
        choice, numbers = self.random.choice, self.random.randint
        self.transfer += self.random.random() < 0.1
        session, number = choice(SESSIONS), self.transfer - numbers(0, 4)
        request = choice([*list(self.born)[-3:], "r0", "unknown"])
        kind = self.random.random()
        if kind < 0.15:
            stranger = self.random.random() < 0.3
            return hello(f"s{number}", "guessed", metadata=b"stranger") if stranger else hello(session)
        if kind < 0.65:
            chunks = tuple(wire.Chunk(n, (n + 1,), numbers(1, LAYERS)) for n in range(numbers(0, 3)))
            whole = len(chunks) == 3
            return wire.Publish(session, number, request, b"p" * 16, 3, 0, chunks, whole)
        if kind < 0.72:
            secret = choice([SECRET, "guessed", ""])
            return wire.Declined(session, secret, request, b"p" * 16, "why", "d")
        if kind < 0.8:
            return wire.Closed(session, number, "why", self.random.random() < 0.5)
        if kind < 0.9:
            return wire.Finished(session, number)
        return wire.BeatAck(session, tuple(range(numbers(0, 12))))

    def frame(self, identity, frame, descriptor):
        self.worker._receive(self.clock.now, identity, frame, descriptor)

    def step(self):
        worker, random = self.worker, self.random
        kind = random.random()
        if kind < 0.1 and len(self.born) < 4:
            name = f"r{next(self.numbers)}"
            self.born[name] = self.clock.now
            order = Receive(name, name, b"p" * 16, (3, 4, 5), random.randint(0, 2))
            worker.begin_step(metadata.DecodeMetadata([order], [], SECRET))
        elif kind < 0.12 and self.born:
            worker.begin_step(metadata.DecodeMetadata([], [(random.choice(list(self.born)), "")]))
        elif kind < 0.13 and self.born:
            self.collect({random.choice(list(self.born))})
        elif kind < 0.3:
            self.clock.now += random.choice([0.01, 0.1, 0.5])
            worker._round(set(), self.clock.now)
            self.collect(set())
        if kind > 0.97 and self.born:
            self.serve(random.choice(list(self.born)))
        message, frame = self.frames.next()
        honest = random.random() < 0.95
        identity = message.session.encode() if honest else random.randbytes(5)
        self.frame(identity, frame, -2 - hash(message.session) % 50)

    def serve(self, req_id):
        """A correct prefill rank."""
        self.transfer += 1
        number = self.transfer
        chunks = tuple(wire.Chunk(n, (n + 1,), LAYERS) for n in range(3))
        publish = wire.Publish("good", number, req_id, b"p" * 16, 3, 0, chunks, True)
        for message in (hello("good"), publish):
            self.frame(b"good", wire.encode(message), -99)
        for _ in range(8):
            self.worker._round(set(), self.clock.now)
        self.frame(b"good", wire.encode(wire.Finished("good", number)), -99)

    def collect(self, aborted):
        results = self.worker.finish_step(aborted)
        for req_id in results.received:
            del self.born[req_id]
            failed = req_id in results.failures
            assert failed or not results.failed_blocks or len(results.received) > 1
            self.fates["failed" if failed else "received"] += 1

    def check(self):
        consumer = self.worker.protocol
        self.worker._carry_out()
        assert self.worker.errors == 0
        for req_id, born in self.born.items():
            assert self.clock.now - born <= LIMITS.request_s + 1.0, req_id
        assert len(consumer.peers) <= min(MAX_PEERS, 16)
        assert len(consumer._early) <= 2000
        assert len(consumer._declines) <= DECLINES_KEPT
        assert len(self.worker._gate) <= 60
        assert not consumer.outbox
        assert not consumer.orders
        assert len(self.worker._reads) <= len(consumer._reads)

    def settle(self):
        for _ in range(400):
            self.clock.now += 0.1
            self.worker._round(set(), self.clock.now)
            self.collect(set())
        self.check()
        assert not self.born
        assert not self.worker.protocol.live
        assert not self.worker._reads


class PrefillRig(Rig):
    """Prefill, and decode ranks of which some are no such."""

    ENDPOINTS = (("10.0.0.1", 1), ("10.0.0.2", 1), ("*", 1), ("a b", 1))

    def __init__(self, monkeypatch, seed):
        super().__init__(monkeypatch, seed)
        self.worker = worker_p.PrefillWorker(
            Engine(self.random), LAYOUT, FACTS,
            engine_id="p", tp_size=1, tp_rank=0, limits=LIMITS,
        )  # fmt: skip
        self.session = self.worker.protocol.hello.session
        self.running: dict[str, int] = {}
        self.freed = 0
        self.owed: dict[str, float] = {}
        self.frames = Frames(self.random, self.sample)
        monkeypatch.setattr(worker_p, "send", lambda _socket, frames: wire.decode_to_decode(frames[0]))
        connect = self.worker._socket

        def unconnected(endpoint):
            return connect(endpoint) if not endpoint[0].startswith("10.") else SimpleNamespace()

        self.worker._socket = unconnected

    def sample(self):
        choice, numbers = self.random.choice, self.random.randint
        session = choice(["d0", "d1"])
        newest = max(self.worker.protocol._transfers, default=1)
        number = max(0, newest - numbers(0, 3))
        kinds = [
            wire.HelloAck(session, self.session),
            wire.Refused(session, self.session, "no"),
            wire.NeedHello(session, self.session),
            wire.Finish(session, self.session, number),
            wire.Cancel(session, self.session, number, "why"),
            wire.Beat(session, self.session, ((number, numbers(0, 3), numbers(0, 3)),)),
            wire.Beat(session, self.session, tuple((n, 1, 1) for n in range(50))),
            wire.Progress(session, self.session, ((number, numbers(0, 3), numbers(0, 3)),)),
        ]
        return self.random.choices(kinds, [8, 0.2, 1, 2, 1, 4, 1, 4])[0]

    def step(self):
        random, worker = self.random, self.worker
        kind = random.random()
        if kind < 0.15:
            self.compute()
        elif kind < 0.3:
            self.clock.now += random.choice([0.01, 0.1])
            self.round()
        _, frame = self.frames.next()
        worker._receive(self.clock.now, random.choice(self.ENDPOINTS), frame)

    def compute(self):
        random = self.random
        if len(self.running) < 4:
            self.running[f"r{next(self.numbers)}"] = 0
        req_id = random.choice(list(self.running))
        done = self.running[req_id]
        host, port = random.choice(self.ENDPOINTS)
        target = metadata.Target(host, port, random.choice([1, 1, 1, 2, 0]), random.choice([SECRET, "x"]))
        step = metadata.PrefillStep(req_id, req_id, target, b"p" * 16, 3, done == 0, done, (done,), done == 2)
        self.worker.begin_step(metadata.PrefillMetadata([step]))
        self.worker.end_step()
        self.running[req_id] += 1
        if done == 2:
            del self.running[req_id]
            self.owed[req_id] = self.clock.now
            self.worker.begin_step(metadata.PrefillMetadata(held=[req_id]))

    def round(self):
        self.worker._round(set(), self.clock.now)
        for req_id in self.worker.finish_step().sent:
            del self.owed[req_id]
            self.freed += 1

    def check(self):
        producer = self.worker.protocol
        assert self.worker.errors == 0
        assert len(producer._transfers) <= len(self.running) + len(self.owed)
        assert len(producer.links) <= len(self.ENDPOINTS) + 4

    def settle(self):
        for req_id in self.running:
            self.worker.drop(metadata.PrefillMetadata(dropped=[(req_id, False)]))
        self.running.clear()
        for _ in range(20):
            self.clock.now += 0.2
            self.round()
        self.check()
        assert not self.owed, "blocks are held without a heartbeat"


@pytest.fixture(params=[DecodeRig, PrefillRig])
def rig(request, monkeypatch):
    made = request.param(monkeypatch, SEED)
    yield made
    made.worker.stop()


@pytest.fixture
def forgotten_lines(monkeypatch):
    """Lines are formatted and dropped: pytest would keep them all, and they would count as growth."""
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _self, record: handler.format(record))


@pytest.mark.usefixtures("forgotten_lines")
def test_frames_of_any_content(rig):
    objects = []
    for part in range(5):
        for number in range(FRAMES // 10):
            rig.step()
            if number % 500 == 0:
                rig.check()
        rig.settle()
        gc.collect()
        objects.append(len(gc.get_objects()))
        assert part < 2 or objects[part] < 1.05 * objects[1] + 20_000, objects
    if isinstance(rig, DecodeRig):
        assert min(rig.fates.values()) > FRAMES / 5000, rig.fates
    else:
        assert rig.freed > FRAMES / 500


@pytest.mark.parametrize("frame", CORPUS.values(), ids=CORPUS)
def test_what_was_found_before(frame, monkeypatch):
    """Sent by a peer while its request is read, and by a stranger: the peer's next request is received."""
    rig = DecodeRig(monkeypatch, 1)
    rig.worker._reads._engine.random = SimpleNamespace(random=lambda: 0.5)  # reads end at once, none fails
    try:
        rig.frame(b"p0", wire.encode(hello("p0")), -2)
        for number, request in enumerate(("r0", "r1"), 1):
            order = Receive(request, request, b"p" * 16, (3, 4, 5), 0)
            rig.born[request] = rig.clock.now
            rig.worker.begin_step(metadata.DecodeMetadata([order], [], SECRET))
            for identity, descriptor in ((b"p0", -2), (b"q0", -3), (b"q1", -3), (b"s", -4)):
                if number == 1:
                    rig.frame(identity, frame, descriptor)
            chunks = tuple(wire.Chunk(n, (n + 1,), LAYERS) for n in range(3))
            publish = wire.Publish("p0", number, request, b"p" * 16, 3, 0, chunks, True)
            rig.frame(b"p0", wire.encode(publish), -2)
            rig.worker._round(set(), rig.clock.now)
            rig.frame(b"p0", wire.encode(wire.Finished("p0", number)), -2)
        rig.settle()
        assert rig.fates["received"] >= 1
        assert sum(rig.fates.values()) == 2
        assert set(rig.worker.protocol.peers) <= {"p0"}
    finally:
        rig.worker.stop()


def test_frames_over_a_socket_do_no_harm():
    """Unauthenticated peers send arbitrary frames while requests are received."""
    import zmq

    bench, context = Bench(), zmq.Context()
    source = random.Random(SEED)
    try:
        sample = DecodeRig.sample
        rig = SimpleNamespace(random=source, born={}, transfer=10)
        frames = Frames(source, lambda: sample(rig))
        strangers = []
        for number in range(8):
            strangers.append(context.socket(zmq.DEALER))
            strangers[-1].setsockopt(zmq.IDENTITY, SESSIONS[number % 6].encode())
            strangers[-1].connect(f"tcp://{HOST}:{bench.port}")
        for number in range(4):
            for _ in range(800):
                message = [frames.next()[1] for _ in range(source.choice([1, 1, 1, 2, 30]))]
                source.choice(strangers).send_multipart(message, flags=zmq.NOBLOCK)
            bench.expect(f"r{number}", [3, 4])
            bench.compute(f"r{number}", [[1, 2]], 2)
            assert bench.wait(f"r{number}") == set()
            bench.check([3, 4], [1, 2])
        assert bench.decode.errors == bench.prefill.errors == 0
        assert list(bench.decode.protocol.peers) == [bench.prefill.protocol.hello.session]
    finally:
        context.destroy(linger=0)
        bench.close()


def test_the_frames_reach_the_machines(monkeypatch):
    """The control: half of the frames are messages, and most kinds of damage are seen."""
    rig = DecodeRig(monkeypatch, SEED)
    try:
        outcomes = {True: 0, False: 0}
        for _ in range(4000):
            _, frame = rig.frames.next()
            try:
                wire.decode_to_decode(frame)
                outcomes[True] += 1
            except wire.WireError:
                outcomes[False] += 1
        assert min(outcomes.values()) > 1000, outcomes
    finally:
        rig.worker.stop()
