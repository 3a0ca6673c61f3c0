"""The workers' halves over real sockets, with an engine that copies within this process; no vLLM engine."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from tests.connectors.pd_bench import (
    BLOCKS,
    FACTS,
    HOST,
    LAYERS,
    LIMITS,
    Bench,
    Memmove,
    make_caches,
    metadata,
)
from vllm_kvoffload.connectors.sfa_remote_d2h import io_thread, reads, worker_d
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure, ReadOrder
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Hello
from vllm_kvoffload.connectors.sfa_remote_d2h.worker_d import DecodeWorker
from vllm_kvoffload.connectors.sfa_remote_d2h.worker_p import PrefillWorker
from vllm_kvoffload.metrics import find_stats
from vllm_kvoffload.settings.errors import ConfigError


@pytest.fixture
def bench():
    before = threading.active_count()
    made = Bench()
    yield made
    made.close()
    made.close()
    assert made.decode_engine.closed
    assert threading.active_count() == before


def test_a_request_arrives_and_frees_its_blocks(bench):
    bench.expect("r", [9, 8, 7, 2, 1])
    bench.compute("r", [[0, 1, 2], [5, 4]], 5)
    assert bench.wait("r") == set()
    bench.check([9, 8, 7, 2, 1], [0, 1, 2, 5, 4])
    assert bench.wait_freed()[0] == {"r"}
    untouched = [block for block in range(BLOCKS) if block not in (9, 8, 7, 2, 1)]
    assert all(not cache[untouched].any() for cache in bench.ours.values())


@pytest.mark.parametrize("at_end", [True, False])
def test_the_last_layer_may_wait_for_the_end_of_the_step(bench, at_end):
    """Beside a store a step may still be found invalid at its end; a transfer is complete only then."""
    made = PrefillWorker(
        Memmove(), Layout.of(bench.theirs, BLOCKS), FACTS, engine_id="q", tp_size=1, tp_rank=0,
        limits=LIMITS, last_layer_at_end=at_end,
    )  # fmt: skip
    published = []
    made._publish_when = lambda _written, layers: published.append(layers)
    made._step = ["r"]
    for layer in range(LAYERS):
        made.layer_done(layer)
    assert published == list(range(1, LAYERS + 1 - at_end))
    made.end_step()
    assert published[-1] == LAYERS
    made.stop()


class DeviceEvent:
    """An event of a device that has not got there while `held` is set."""

    held = threading.Event()
    label = "device"

    def query(self):
        return not self.held.is_set()

    def wait(self, deadline_s=None):
        end = time.monotonic() + deadline_s
        while not self.query():
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.parametrize("told", [True, False], ids=["with events", "control"])
def test_what_the_device_still_writes_is_not_read(bench, told):
    """On an NPU a layer's writes are queued, not done, when prefill says that it has computed the layer."""
    written = {name: cache.clone() for name, cache in bench.theirs.items()}
    for cache in bench.theirs.values():
        cache.zero_()
    layer_done, end_step = bench.prefill.layer_done, bench.prefill.end_step
    if told:
        DeviceEvent.held.set()
        bench.prefill.layer_done = lambda layer: layer_done(layer, DeviceEvent())
        bench.prefill.end_step = lambda: end_step(DeviceEvent())
    bench.expect("r", [3, 4])
    compute = threading.Thread(target=bench.compute, args=("r", [[1, 2]], 2))  # its next step waits
    compute.start()
    time.sleep(0.3)
    read_early = bench.decode.bytes_read
    for name, cache in bench.theirs.items():
        cache.copy_(written[name])
    DeviceEvent.held.clear()
    compute.join(20)
    assert bench.wait("r") == set()
    assert (read_early == 0) == told
    assert torch.equal(bench.ours["model.layers.0.attn"][3], written["model.layers.0.attn"][1]) == told


def test_both_sides_publish_metrics(bench):
    bench.decode_engine.gate.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    bench.wait_metrics("prefill", open_transfers=1, kept_requests=1, transfers_opened=1, peer_ranks=1)
    bench.wait_metrics("decode", **{"receives.reading": 1, "receives_started": 1, "peer_ranks": 1})
    assert "pulled_bytes" not in bench.metrics()["decode"]
    bench.decode_engine.gate.set()
    assert bench.wait("r") == set()
    bench.wait_freed()
    bench.expect("s", [5, 6])
    bench.compute("s", [[2]], 2, whole=False)
    # Three layers of 4 x 8 floats and two indexers' of 4 x 2; two blocks of the one, one of the other.
    pulled_bytes = (3 * 4 * 8 + 2 * 4 * 2) * 4 * 3
    bench.wait_metrics("decode", pulled_bytes=pulled_bytes)
    bench.prefill.drop(metadata.PrefillMetadata(dropped=[("s", False)]))
    bench.wait("s")
    bench.wait_metrics("decode", **{"receives_done": 1, "receives_failed.prefill": 1, "receives_started": 2})
    ends = {"transfers_closed.finished": 1, "transfers_closed.aborted": 1}
    bench.wait_metrics("prefill", transfers_opened=2, **ends)
    assert bench.metrics()["prefill"] == {"transfers_opened": 2, "peer_ranks": 1, **ends}
    assert bench.metrics()["decode"]["pulled_bytes"] == pulled_bytes
    bench.close()
    assert not find_stats(os.getpid(), bench.instance)


def test_a_rank_may_read_other_blocks_of_the_main_kv_than_of_the_indexer():
    """As with several decode ranks, which divide the main KV of a prompt among them."""
    engine, prefill = Memmove(), Memmove()
    ours, theirs = make_caches(torch.zeros), make_caches(torch.rand)
    layout, remote = Layout.of(ours, BLOCKS), Layout.of(theirs, BLOCKS)
    engine.register(layout.regions)
    prefill.register(remote.regions)
    hello = Hello("s", "e", 1, 0, "d", BLOCKS, remote.layers, prefill.local_metadata(), 1.0, False, "", FACTS)
    made = reads.Reads(engine, layout)
    assert made.meet(hello) == ""
    made.begin(ReadOrder(7, "s", "r", range(LAYERS), main=((3, 1),), indexer=((4, 2), (5, 1))))
    ended = []
    while not ended:
        ended, _ = made.poll()
    assert ended == [(7, "")]
    for name, cache in ours.items():
        expected = torch.zeros_like(cache)
        for here, there in ((4, 2), (5, 1)) if "indexer" in name else ((3, 1),):
            expected[here] = theirs[name][there]
        assert torch.equal(cache, expected), name


def test_reads_follow_each_other_without_a_wait(bench, monkeypatch):
    monkeypatch.setattr(worker_d, "BUSY_S", 30.0)
    monkeypatch.setattr(reads, "PIECE_BYTES", 1)
    bench.expect("r", [9, 8, 7, 2, 1])
    bench.compute("r", [[0, 1, 2], [5, 4]], 5)
    assert bench.wait("r") == set()
    bench.check([9, 8, 7, 2, 1], [0, 1, 2, 5, 4])


def test_engines_that_wait_for_each_other_take_few_steps(bench):
    bench.decode_engine.gate.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    bench.wait_metrics("decode", **{"receives.reading": 1})
    bench.wait_metrics("prefill", kept_requests=1)
    for step in (
        lambda idle: bench.prefill.finish_step(idle=idle).sent,
        lambda idle: bench.decode.finish_step(idle=idle).received,
    ):
        begin, steps = time.monotonic(), 0
        while time.monotonic() < begin + 0.3:
            assert not step(True)
            steps += 1
        assert steps < 50
        begin = time.monotonic()
        for _ in range(50):
            assert not step(False)  # one that computed something doesn't wait
        assert time.monotonic() < begin + 0.2
    bench.decode_engine.gate.set()


def test_news_end_the_wait(bench):
    bench.prefill._idle._wait_s = bench.decode._idle._wait_s = 60.0
    bench.decode_engine.gate.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    bench.wait_metrics("decode", **{"receives.reading": 1})
    begin, told = time.monotonic(), []
    waits = [
        threading.Thread(target=lambda: told.append(bench.prefill.finish_step(idle=True).sent)),
        threading.Thread(target=lambda: told.append(bench.decode.finish_step(idle=True).received)),
    ]
    for thread in waits:
        thread.start()
    time.sleep(0.3)
    assert not told
    bench.decode_engine.gate.set()
    for thread in waits:
        thread.join(30)
    assert told == [{"r"}, {"r"}]
    assert time.monotonic() - begin < 20


def test_prefill_may_be_first(bench):
    bench.compute("r", [[0, 1]], 2)
    time.sleep(0.3)
    bench.expect("r", [3, 4])
    assert bench.wait("r") == set()
    bench.check([3, 4], [0, 1])


def test_cached_blocks_stay(bench):
    bench.expect("r", [3, 4, 5], first=2)
    bench.compute("r", [[0, 1, 2]], 3)
    assert bench.wait("r") == set()
    bench.check([5], [2])
    assert all(not cache[[3, 4]].any() for cache in bench.ours.values())


def test_a_broken_read_is_tried_again_and_then_fails(bench):
    bench.decode_engine.broken = 2
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == set()
    assert bench.wait_freed()[0] == {"r"}
    bench.decode_engine.broken = 100
    bench.expect("s", [5, 6], first=1)
    bench.compute("s", [[2, 3]], 2)
    assert bench.wait("s") == {6}
    assert bench.wait_freed()[0] == {"s"}


def test_an_abort_waits_for_the_read(bench):
    bench.decode_engine.gate.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    end = time.monotonic() + 5
    while not bench.decode._reads:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not bench.decode.finish_step({"r"}).received
    time.sleep(0.2)
    assert not bench.decode.finish_step().received, "a read may still write into its blocks"
    assert bench.wait_freed()[0] == {"r"}
    bench.decode_engine.gate.set()
    assert bench.wait("r") == {3, 4}


def test_a_lease_ends_when_decode_is_gone(bench):
    bench.decode_engine.gate.clear()
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    time.sleep(0.2)
    bench.decode.stop()
    freed, seconds = bench.wait_freed()
    assert freed == {"r"}
    assert seconds < LIMITS.lease_s + 1


def test_decode_restarts(bench):
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait("r") == set()
    bench.decode.stop()
    bench.decode_engine = Memmove()
    bench.decode = bench.start_decode()
    bench.expect("s", [5, 6])
    bench.compute("s", [[2, 3]], 2)
    assert bench.wait("s") == set()
    bench.check([5, 6], [2, 3])


def test_prefill_of_another_layout_is_refused(bench, caplog):
    bench.decode.stop()
    bench.decode_engine = Memmove()
    bench.decode = bench.start_decode({"dtype": "float16"}, replace(LIMITS, request_s=60.0))
    bench.expect("r", [3, 4])
    bench.compute("r", [[0, 1]], 2)
    assert bench.wait_freed(3.0)[0] == {"r"}
    assert bench.wait("r", 12) == {3, 4}
    reason = "prefill and decode differ in dtype (prefill float32, decode float16)"
    layout = bench.prefill.protocol.hello.digest
    assert bench.failures == {"r": Failure(reason, "mismatch", layout)}
    assert any(reason in record.message and "prefill rank" in record.message for record in caplog.records)
    assert any(reason in record.message and "decode rank" in record.message for record in caplog.records)


def test_an_aborted_prefill_ends_the_request(bench):
    bench.expect("r", [3, 4])
    bench.compute("r", [[0]], 2, whole=False)
    bench.wait_metrics("decode", **{"receives.reading": 1})
    bench.prefill.drop(metadata.PrefillMetadata(dropped=[("r", False)]))
    assert bench.wait("r", 3.0) == {3, 4}
    assert not bench.prefill.finish_step().sent


def test_rubbish_on_the_control_port_does_no_harm(bench):
    import zmq

    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{HOST}:{bench.port}")
    for frame in (b"", b"GET / HTTP/1.1", b"\x01\xc1", b"\x02hello"):
        stranger.send(frame)
    bench.expect("r", [3])
    bench.compute("r", [[1]], 1)
    assert bench.wait("r") == set()
    context.destroy(linger=0)


def test_a_taken_port_is_named(bench):
    with pytest.raises(ConfigError, match=f"kv_port={bench.port}"):
        DecodeWorker(
            Memmove(), Layout.of(bench.ours, BLOCKS), FACTS,
            host=HOST, port=bench.port, tp_size=1, tp_rank=0, limits=LIMITS,
        )  # fmt: skip


def test_a_thread_that_runs_late_says_so(bench, monkeypatch):
    """Else no log tells why leases ended."""
    said = []
    monkeypatch.setattr(io_thread, "LATE_S", 0.2)
    monkeypatch.setattr(io_thread.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(bench.decode, "_poll_reads", lambda: time.sleep(0.5))
    end = time.monotonic() + 10
    while not any(text.startswith("kvoffload-decode-io runs") for text in said):
        assert time.monotonic() < end
        time.sleep(0.05)
