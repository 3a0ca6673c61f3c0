"""Effects of faulty peers, unauthenticated peers and bad addresses, over real sockets."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest
import zmq

from tests.connectors.pd_bench import HOST, LIMITS, Bench, metadata
from vllm_kvoffload.connectors.sfa_remote_d2h import connection_gate, wire, worker_d, worker_p
from vllm_kvoffload.connectors.sfa_remote_d2h.curve import ControlKey
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure
from vllm_kvoffload.transfer import TransferError

KEYS = ("5e" * 32, "6e" * 32)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def receives(bench, req_id="good"):
    bench.expect(req_id, [9, 8])
    bench.compute(req_id, [[0, 1]], 2)
    assert bench.wait(req_id) == set()
    bench.check([9, 8], [0, 1])


def until(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------- missing reads


@pytest.mark.parametrize("error", [TransferError("no such memory"), RuntimeError("a bug"), OverflowError()])
def test_memory_that_cannot_be_read_fails_the_request_by_name(bench, error):
    """It was taken as read: wrong tokens."""

    def add_peer(_metadata):
        raise error

    good, bench.decode_engine.add_peer = bench.decode_engine.add_peer, add_peer
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == {3, 4}
    assert bench.failures["r"].failure == "mismatch"
    assert bench.failures["r"].reason.startswith("decode can't read prefill's memory")
    assert not bench.decode.protocol.peers
    bench.decode_engine.add_peer = good
    bench.prefill.protocol.links.clear()  # else prefill asks again after REFUSED_S
    receives(bench)


def test_layers_of_another_size_than_the_digest_says(bench):
    producer = bench.prefill.protocol
    layers = tuple(msgspec.structs.replace(layer, main=((4096, 64, 64),)) for layer in producer.hello.layers)
    producer.hello = msgspec.structs.replace(producer.hello, layers=layers)
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == {3, 4}
    assert bench.failures["r"] == Failure(
        "prefill has other layers than its digest says", "mismatch", producer.hello.digest
    )


def test_a_read_counts_by_its_bytes(bench):
    read, short = bench.decode_engine.read, [True]

    def less(peer, spans):
        handle = read(peer, spans)
        handle.nbytes -= short[0]
        return handle

    bench.decode_engine.read = less
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == {3, 4}
    assert bench.failures["r"].failure == "read"
    assert "bytes were read" in bench.failures["r"].reason
    short[0] = False
    receives(bench)


def test_a_source_that_is_missing_is_an_error(bench):
    receives(bench)
    bench.decode._reads._sources.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == {3, 4}
    assert "prefill's memory is not known" in bench.failures["r"].reason


@pytest.mark.parametrize("method", ["read", "poll", "cancel", "remove_peer"])
def test_an_engine_that_raises_costs_one_request(bench, method, monkeypatch):
    monkeypatch.setattr("vllm_kvoffload.connectors.sfa_remote_d2h.reads.QUIET_S", 0.2)
    good = getattr(bench.decode_engine, method)

    def bad(*_args):
        raise RuntimeError("a bug")

    setattr(bench.decode_engine, method, bad)
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2, whole=method != "cancel")
    if method in ("read", "poll"):
        assert bench.wait("r") == {3, 4}
        assert "a bug" in bench.failures["r"].reason
    elif method == "remove_peer":
        assert bench.wait("r") == set()
        with bench.decode.lock:
            (session,) = bench.decode.protocol.peers
            bench.decode.protocol._forget(time.monotonic(), session)
        until(lambda: bench.decode._reads.errors)
    else:
        until(lambda: "r" in bench.decode.finish_step({"r"}).received)
    setattr(bench.decode_engine, method, good)
    receives(bench)


def test_an_error_of_a_round_ends_no_thread(bench):
    tick, failed = bench.decode.protocol.tick, []

    def bad(_now):
        failed.append(1)
        raise RuntimeError("a bug")

    bench.decode.protocol.tick = bench.prefill.protocol.tick = bad
    until(lambda: len(failed) > 4)
    bench.decode.protocol.tick = tick
    del bench.prefill.protocol.tick
    receives(bench)
    bench.wait_metrics("decode", control_errors=bench.decode.errors)
    assert bench.decode.errors > 0


# ------------------------------------------------------------------------------ secrets and keys


def hello_of(bench, **changes):
    hello = msgspec.structs.replace(bench.prefill.protocol.hello, session="stranger", **changes)
    return wire.encode(hello)


def test_a_strangers_metadata_never_reach_the_transfer_engine(bench):
    """They crash NIXL's parser, and decode with it."""
    seen, add_peer = [], bench.decode_engine.add_peer
    bench.decode_engine.add_peer = lambda data: (seen.append(data), add_peer(data))[1]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(f"tcp://{HOST}:{bench.port}")
    for secret in ("", "guessed", bench.secret[:-1], bench.secret.upper()):
        stranger.send(hello_of(bench, metadata=b"\xff" * 99, secret=secret))
    receives(bench)
    until(lambda: bench.decode.frames_refused >= 4)
    assert seen == [bench.prefill.protocol.hello.metadata]
    assert not stranger.poll(300), "a stranger gets no answer"
    context.destroy(linger=0)


def test_a_peers_session_is_of_no_use_without_its_secret(bench):
    """An eavesdropper cannot speak for the peer: each connection introduces itself."""
    bench.expect("r", [3, 4])
    bench.compute("r", [[0]], 2, whole=False)
    bench.wait_metrics("decode", **{"receives.reading": 1})
    session = bench.prefill.protocol.hello.session
    forged, watch, received = wire.encode(wire.Closed(session, 1, "forged", False)), bench.decode._watch, []

    def forge(now):  # on the thread that owns the socket
        watch(now)
        bench.decode._receive(now, session.encode(), forged, -5)
        received.append(now)

    bench.decode._watch = forge
    until(lambda: len(received) >= 3)
    del bench.decode._watch
    assert "r" in bench.decode.protocol.live
    bench.prefill.drop(metadata.PrefillMetadata(dropped=[("r", False)]))
    assert bench.wait("r") == {3, 4}
    assert "forged" not in bench.failures["r"].reason


@pytest.mark.parametrize("keys", [(KEYS[0], KEYS[0]), (KEYS[0], KEYS[1]), (None, KEYS[0]), (KEYS[0], None)])
def test_control_keys(keys, caplog, monkeypatch):
    monkeypatch.setattr(worker_p, "SILENT_S", 0.5)
    monkeypatch.setattr("vllm_kvoffload.connectors.sfa_remote_d2h.producer.SILENT_S", 0.5)
    bench = Bench(keys)
    try:
        if keys[0] == keys[1]:
            receives(bench)
            return
        bench.expect("r", [3, 4])
        bench.compute("r", [[0, 1]], 2)
        assert bench.wait_freed()[0] == {"r"}
        assert bench.wait("r", 20) == {3, 4}
        assert not bench.decode.protocol.peers
        assert bench.decode.bytes_read == 0
        said = [record.message for record in caplog.records]
        assert sum("has not answered" in text and "control_key_file" in text for text in said) == 1
        assert sum("connection to the control port failed" in text for text in said) == 1
    finally:
        bench.close()


def test_the_public_key_alone_lets_none_in():
    """CURVE alone admits any client that knows the server's public key."""
    keyed, context = Bench((KEYS[0], KEYS[0])), zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = ControlKey(KEYS[0])._public
        client.connect(f"tcp://{HOST}:{keyed.port}")
        client.send(b"x")
        receives(keyed)
        until(lambda: keyed.decode._gate.failed)
        assert keyed.decode.frames_refused == 0
    finally:
        context.destroy(linger=0)
        keyed.close()


# ------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize("host", ["*", "decode_1:20150/x y", "a..b", "x" * 64, "☃", "a\0b", "0.0.0.0", ""])
def test_a_bad_host_costs_its_own_transfers(bench, host, caplog):
    """libzmq refuses some of them: the messages queued behind them were lost as well."""
    for number in range(3):
        bench.compute(f"bad{number}", [[5]], 1, host=host)
    receives(bench)
    freed = set()
    end = time.monotonic() + 3
    while len(freed) < 4 and time.monotonic() < end:
        freed |= bench.prefill.finish_step().sent
        time.sleep(0.01)
    assert freed == {"bad0", "bad1", "bad2", "good"}
    bench.wait_metrics("prefill", **{"transfers_closed.unreachable": 3})
    lines = [record.message for record in caplog.records if "can't be talked to" in record.message]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert bench.prefill.errors == 0


def test_another_name_of_decode_costs_its_other_requests_nothing(bench):
    """Both connections had one ZeroMQ identity: the second took the first one's messages, for good."""
    for number, host in enumerate([HOST, "localhost", HOST, HOST, "localhost", HOST]):
        receives(bench, f"r{number}-{host}")
    bench.expect("early", [3, 4])  # one transfer under each name at a time
    bench.compute("early", [[2]], 2, whole=False)
    receives(bench, "other name")
    bench.compute("alias", [[5]], 1, host="localhost", whole=False)
    time.sleep(2 * LIMITS.lease_s)
    assert {"early"} <= bench.prefill.protocol.open_requests
    assert bench.decode.protocol.live == {"early": "reading"}


def test_many_endpoints_are_bounded(bench, monkeypatch):
    """1,100 of them reach libzmq's limit of sockets, which then every other connection hits."""
    monkeypatch.setattr(worker_p, "MAX_ENDPOINTS", 8)
    receives(bench)
    for number in range(40):
        bench.compute(f"dead{number}", [[5]], 1, host=f"127.0.1.{number + 1}", port=9)
    time.sleep(0.3)
    assert len(bench.prefill._sockets) <= 8
    assert len(bench.prefill.protocol.links) <= 48
    bench.wait_metrics("prefill", **{"transfers_closed.unreachable": 33})  # decode's own is in use
    until(lambda: not bench.prefill.protocol.open_requests)
    receives(bench, "later")
    assert len(bench.prefill._sockets) <= 8


def test_many_declines_close_no_connection_in_use(bench, monkeypatch):
    """Room was made by closing all idle connections, with answers that had only just been queued."""
    monkeypatch.setattr(worker_p, "MAX_ENDPOINTS", 8)
    receives(bench)
    connection = bench.prefill._sockets[HOST, bench.port]
    target = metadata.Target(HOST, 9, 64, "")
    for number in range(3):
        decline = metadata.Decline(f"d{number}", target, bytes(16), "no")
        bench.prefill.begin_step(metadata.PrefillMetadata(declined=[decline]))
        receives(bench, f"r{number}")
    assert bench.prefill._sockets[HOST, bench.port] is connection
    assert len(bench.prefill._sockets) <= 8


# ------------------------------------------------------------------------------ the control port


def test_strangers_connections_end(bench, monkeypatch):
    monkeypatch.setattr(connection_gate, "UNAUTHENTICATED_S", 1.0)
    monkeypatch.setattr(connection_gate, "MAX_UNPROVEN", 4)
    receives(bench)
    context = zmq.Context()
    silent = [socket.create_connection((HOST, bench.port)) for _ in range(12)]
    until(lambda: bench.decode._gate.closed >= 8)
    speakers = [context.socket(zmq.DEALER) for _ in range(2)]
    for speaker in speakers:
        speaker.setsockopt(zmq.RECONNECT_IVL, -1)
        speaker.connect(f"tcp://{HOST}:{bench.port}")
    receives(bench, "meanwhile")
    until(lambda: bench.decode._gate.closed >= 14)
    until(lambda: bench.decode._gate.unproven == 0)
    bench.wait_metrics("decode", unauthenticated_closed=bench.decode._gate.closed)
    for connection in silent:
        connection.settimeout(5)
        while connection.recv(100):
            pass
        connection.close()
    time.sleep(1.5)
    assert len(bench.decode._gate) == 1, "the peer's stays"
    receives(bench, "after")
    context.destroy(linger=0)


def test_what_speaks_no_zmtp_3_is_refused(bench):
    """An HTTP request, say: libzmq takes it for ZMTP 1, whose messages name no connection. Each was an error
    with a traceback."""
    with socket.create_connection((HOST, bench.port)) as stranger:
        stranger.sendall(b"\x01\x00" + 3 * b"\x05\x00abcd")
        until(lambda: bench.decode.frames_refused)
    assert bench.decode.errors == 0
    receives(bench)


def test_strangers_of_one_name_hold_no_descriptors(bench, monkeypatch):
    """libzmq never closes a connection whose name another took while messages of it were waiting."""
    monkeypatch.setattr(worker_d, "MAX_STUCK", 20)
    monkeypatch.setattr(connection_gate, "UNAUTHENTICATED_S", 0.5)
    receives(bench)
    idle = [socket.create_connection((HOST, bench.port)) for _ in range(30)]
    until(lambda: bench.decode._gate.closed >= 30 and not bench.decode._gate.stuck)  # these libzmq closes
    before = bench.decode._router
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(40)]
    for stranger in strangers:
        stranger.setsockopt(zmq.IDENTITY, b"same")
        stranger.setsockopt(zmq.SNDHWM, 0)
        stranger.connect(f"tcp://{HOST}:{bench.port}")
        for _ in range(2000):
            stranger.send(b"same")
    until(lambda: bench.decode._router is not before, 30)
    context.destroy(linger=0)
    receives(bench, "later")
    until(lambda: bench.decode._gate.stuck < 20)
    assert bench.decode.errors == 0
    for connection in idle:
        connection.close()


def test_a_control_port_that_is_opened_anew_costs_no_transfer(bench, monkeypatch):
    bench.expect("r", [3, 4])
    bench.compute("r", [[0]], 2, whole=False)
    until(lambda: bench.decode.protocol.live == {"r": "reading"})
    before = bench.decode._router
    monkeypatch.setattr(worker_d, "MAX_STUCK", 0)
    until(lambda: bench.decode._router is not before)
    monkeypatch.setattr(worker_d, "MAX_STUCK", 256)
    time.sleep(3 * LIMITS.lease_s)
    assert bench.decode.protocol.live == {"r": "reading"}
    assert bench.prefill.protocol.open_requests == {"r"}
    assert not bench.decode.protocol.counts.retries


def test_a_message_without_an_end_is_ended(bench, monkeypatch):
    """libzmq keeps the parts of a message until the last: none is seen here before."""
    monkeypatch.setattr(connection_gate, "UNAUTHENTICATED_BYTES", 1 << 20)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.RECONNECT_IVL, -1)
    stranger.setsockopt(zmq.SNDTIMEO, 2000)
    stranger.connect(f"tcp://{HOST}:{bench.port}")
    for _ in range(40):
        stranger.send(b"x" * 100_000, zmq.SNDMORE)
    stranger.send(b"x")
    until(lambda: bench.decode._gate.closed, 5)
    receives(bench)
    context.destroy(linger=0)


def test_large_and_many_parts(bench, caplog):
    context = zmq.Context()
    for parts in ([b"x" * (wire.MAX_FRAME_BYTES + 1)], [b"\nERROR forged"] * 50, [b"\x03" + b"\n" * 100_000]):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"\nforged\xff")
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        stranger.connect(f"tcp://{HOST}:{bench.port}")
        stranger.send_multipart(parts)
        time.sleep(0.2)
    receives(bench)
    lines = [record.message for record in caplog.records if "prefill rank" in record.message]
    assert len(lines) == bench.decode.frames_refused == 2
    assert all(line.isprintable() and len(line) < 700 for line in lines)
    context.destroy(linger=0)


def test_a_flood_of_bad_frames_is_one_line(bench, caplog):
    for _ in range(500):
        bench.decode._receive(time.monotonic(), b"x", b"\x03rubbish", -3)
    assert bench.decode.frames_refused == 500
    assert sum("prefill rank" in record.message for record in caplog.records) == 1


def test_another_version_is_named_on_both_sides(bench, caplog, monkeypatch):
    monkeypatch.setattr(worker_p, "encode", lambda message: b"\x02" + wire.encode(message)[1:])
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    until(lambda: bench.decode.frames_refused)
    assert any("version 2, this side speaks 3" in record.message for record in caplog.records)
    monkeypatch.undo()
    now = time.monotonic()
    bench.prefill._receive(now, (HOST, bench.port), b"\x04" + wire.encode(wire.HelloAck("d", "p"))[1:])
    assert bench.wait_freed(2.0)[0] == {"r"}
    assert any("decode rank" in r.message and "version 4" in r.message for r in caplog.records)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_says_so(bench, caplog):
    def end(_ready, _now):
        raise SystemExit

    bench.prefill._round = end
    bench.prefill.wake()
    until(lambda: any("no KV is handed over any more" in record.message for record in caplog.records))


def test_a_rendezvous_that_fits_no_tp_is_declined_at_once(bench):
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2, tp_size=2)
    assert bench.wait("r", 3.0) == {3, 4}
    assert bench.failures["r"].failure == "mismatch"
    assert "prefill has TP 1, decode TP 2" in bench.failures["r"].reason
