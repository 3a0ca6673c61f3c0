"""A prefill rank and a decode rank over real sockets, with an engine that copies within this process."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time

import pytest
import torch

from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure, Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.connectors.sfa_remote_d2h.worker_d import DecodeWorker
from vllm_kvoffload.metrics import DECODE, PREFILL, StatsChannel, find_stats
from vllm_kvoffload.settings.remote_d2h import RemoteD2HLimits
from vllm_kvoffload.transfer import PeerHandle, ReadHandle, TransferEngine
from vllm_kvoffload.transfer.base import prepare
from vllm_kvoffload.transfer.spans import RegionTable

metadata = pytest.importorskip("vllm_kvoffload.connectors.sfa_remote_d2h.metadata", reason="needs vLLM")
PrefillWorker = pytest.importorskip("vllm_kvoffload.connectors.sfa_remote_d2h.worker_p").PrefillWorker

BLOCKS, LAYERS, WIDTH = 12, 3, 8
FACTS = {"dtype": "float32"}
LIMITS = RemoteD2HLimits(lease_s=1.0, request_s=8.0)
HOST = "127.0.0.1"


class Memmove(TransferEngine):
    """Reads by memmove; `broken` reads fail, and none ends while `gate` is cleared."""

    name = "memmove"
    tables: dict[bytes, RegionTable] = {}  # noqa: RUF012

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.broken = 0
        self.closed = False

    def register(self, regions):
        self.regions = RegionTable(regions)
        self.tables[self.local_metadata()] = self.regions

    def local_metadata(self):
        return str(id(self)).encode()

    def add_peer(self, metadata):
        return PeerHandle(metadata.decode())

    def remove_peer(self, peer):
        pass

    def read(self, peer, spans):
        handle = ReadHandle(spans.total_bytes)
        handle.spans = prepare(spans, self.regions, self.tables[peer.name.encode()])
        return handle

    def poll(self, handle):
        if not self.gate.is_set():
            return handle.status
        if self.broken or handle.cancelled:
            self.broken = max(0, self.broken - 1)
            handle.finish("broken")
            return handle.status
        for local, remote, nbytes in zip(
            handle.spans.local, handle.spans.remote, handle.spans.nbytes, strict=True
        ):
            ctypes.memmove(int(local), int(remote), int(nbytes))
        handle.finish()
        return handle.status

    def cancel(self, handle):
        handle.cancelled = True

    def close(self):
        self.closed = True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def make_caches(fill):
    made = {}
    for layer in range(LAYERS):
        made[f"model.layers.{layer}.attn"] = fill((BLOCKS, 4, WIDTH))
        if layer != 1:
            made[f"model.layers.{layer}.indexer.k_cache"] = fill((BLOCKS, 4, 2))
    return made


class Bench:
    """A prefill rank and a decode rank."""

    def __init__(self, keys=(None, None)):
        torch.manual_seed(0)
        self.key = keys[1]
        self.port = free_port()
        self.instance = f"test-{os.getpid()}-{self.port}"
        self.theirs, self.ours = make_caches(torch.rand), make_caches(torch.zeros)
        self.decode_engine = Memmove()
        self.decode = self.start_decode()
        self.prefill = PrefillWorker(
            Memmove(), Layout.of(self.theirs, BLOCKS), FACTS, engine_id="p", tp_size=1, tp_rank=0,
            limits=LIMITS, channel=StatsChannel(PREFILL, self.instance, 0, 0), control_key=keys[0],
        )  # fmt: skip
        self.prefill.start()
        self.done: dict[str, set[int]] = {}
        self.failures: dict[str, Failure] = {}

    def start_decode(self, facts=FACTS, limits=LIMITS):
        made = DecodeWorker(
            self.decode_engine, Layout.of(self.ours, BLOCKS), facts,
            host=HOST, port=self.port, tp_size=1, tp_rank=0, limits=limits,
            channel=StatsChannel(DECODE, self.instance, 0, 0), control_key=self.key,
        )  # fmt: skip
        self.secret = f"secret {time.monotonic_ns()}"
        made.use_secret(self.secret)
        made.start()
        return made

    def expect(self, req_id, blocks, first=0):
        order = Receive(req_id, req_id, prompt_digest([1]), tuple(blocks), first)
        self.decode.begin_step(metadata.DecodeMetadata([order]))

    def compute(self, req_id, chunks, num_blocks, whole=True, **address):
        """Prefill computes these chunks; `whole`: and is through with the request then."""
        start = 0
        address = {"host": HOST, "port": self.port, "tp_size": 1, "secret": self.secret, **address}
        target, prompt = metadata.Target(**address), prompt_digest([1])
        for number, blocks in enumerate(chunks):
            final = whole and number == len(chunks) - 1
            step = metadata.PrefillStep(
                req_id, req_id, target, prompt, num_blocks, number == 0, start, tuple(blocks), final
            )
            self.prefill.begin_step(metadata.PrefillMetadata([step]))
            for layer in range(LAYERS):
                self.prefill.layer_done(layer)
            self.prefill.end_step()
            start += len(blocks)
        if whole:
            self.prefill.begin_step(metadata.PrefillMetadata(held=[req_id]))

    def wait(self, req_id, seconds=10.0):
        end = time.monotonic() + seconds
        while req_id not in self.done:
            assert time.monotonic() < end, self.decode.protocol.live
            results = self.decode.finish_step(set())
            self.done.update(dict.fromkeys(results.received, results.failed_blocks))
            self.failures.update(results.failures)
            time.sleep(0.01)
        return self.done[req_id]

    def wait_freed(self, seconds=10.0):
        begin, freed = time.monotonic(), set()
        while not freed:
            assert time.monotonic() - begin < seconds
            freed = self.prefill.finish_step().sent
            time.sleep(0.01)
        return freed, time.monotonic() - begin

    def metrics(self):
        """The published values of both ranks, other than 0."""
        found = {stats.part: stats.values for stats in find_stats(os.getpid(), self.instance)}
        return {
            part: {key: value for key, value in values.items() if value} for part, values in found.items()
        }

    def wait_metrics(self, part, **expected):
        end = time.monotonic() + 5
        while not expected.items() <= self.metrics()[part].items():
            assert time.monotonic() < end, self.metrics()
            time.sleep(0.02)

    def check(self, ours, theirs):
        for name, cache in self.ours.items():
            assert torch.equal(cache[ours], self.theirs[name][theirs]), name

    def close(self):
        self.prefill.stop()
        self.decode.stop()
