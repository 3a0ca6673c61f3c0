"""An NPU that is simulated: the torch_npu calls on our paths, on CPU tensors, by the kernels of the CPU
platform.

`install` puts them where vllm-ascend looks for them. Streams and events are those of `SimulatedNPU`; the
threads behind side streams are the CPU runtime's, which can delay them at random.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvoffload.platforms.cpu.kernels import indexer_scores, select_topk, sparse_mla_attend

from tests.ascend.simulated_device import Device, device_op  # isort: skip


class SimulatedNPU:
    """Stands for torch.npu. Work completes at once; `busy` delays new events.

    Kernels launched on a side stream run only when they are waited for: without a wait, their results come
    too late.
    """

    def __init__(self) -> None:
        self.busy = False
        self.graph_calls: list[Callable[[], object]] | None = None
        """A recorded action of a captured graph."""
        self.streams: list[SimulatedStream] = []
        self.main = self.Stream()
        self._current = threading.local()

    def set_device(self, device: int) -> None:
        assert device == 0

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> SimulatedStream:
        return getattr(self._current, "stream", self.main)

    def Stream(self) -> SimulatedStream:  # torch's name
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            with Device():
                yield
        finally:
            self._current.stream = before

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def launch(self, kernel: Callable[[], object]) -> None:
        self.queue(self._launch, self.current_stream(), kernel)

    def queue(self, work: Callable[..., object], *args: Any) -> None:
        """Accepts work on a stream: runs it, or records it during capture."""
        if self.graph_calls is None:
            work(*args)
        else:
            self.graph_calls.append(functools.partial(work, *args))

    def host_waits(self) -> None:
        if self.graph_calls is not None:
            raise RuntimeError("the host can't wait for a device that only writes down what it is told")

    def _launch(self, stream: SimulatedStream, kernel: Callable[[], object]) -> None:
        if stream is self.main:
            kernel()
        else:
            stream.kernels.append(kernel)


class SimulatedStream:
    """Kernels not yet waited for, in order."""

    def __init__(self, npu: SimulatedNPU) -> None:
        self._npu = npu
        self.kernels: list[Callable[[], object]] = []
        self.done = 0

    def wait_event(self, event: SimulatedEvent) -> None:
        self._npu.queue(event.reach)

    def run_to(self, position: int) -> None:
        while self.done < position:
            self.kernels.pop(0)()
            self.done += 1

    def synchronize(self) -> None:
        self._npu.host_waits()
        self.run_to(self.done + len(self.kernels))


class SimulatedEvent:
    """Complete unless the device was busy when it was recorded, and still is."""

    def __init__(self, npu: SimulatedNPU) -> None:
        self._npu, self._held = npu, False

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._npu.queue(self._record, stream or self._npu.current_stream())

    def _record(self, stream: SimulatedStream) -> None:
        self._held = self._npu.busy
        self.stream = stream
        self.position = self.stream.done + len(self.stream.kernels)

    def reach(self) -> None:
        self.stream.run_to(self.position)

    def query(self) -> bool:
        self._npu.host_waits()
        if self._held and self._npu.busy:
            return False
        self.stream.run_to(self.position)  # the caller is about to wait
        return True


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * weight, scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """npu_rotary_mul: pairs are the two halves of the last dimension."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """npu_interleave_rope: pairs are neighbours, and come out as halves."""
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(halves, cos, sin)


def scatter_nd_update(rows: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """In place; negative indices, which pad a batch, are left out."""
    where = indices.view(-1).long()
    rows[where[where >= 0]] = updates[where >= 0]
    return rows


def rmsnorm_rope_cache(
    kv: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    rope_cache: torch.Tensor, latent_cache: torch.Tensor, *, epsilon: float, cache_mode: str,
) -> None:  # fmt: skip
    """Upstream's calls without the offload: norm, rope, and a paged write."""
    assert cache_mode == "PA"
    width = latent_cache.shape[-1]
    latent = rms_norm(kv[..., :width], weight, epsilon)[0].view(len(kv), -1)
    rope = interleave_rope(kv[..., width:], cos, sin).view(len(kv), -1)
    for cache, rows in ((latent_cache, latent), (rope_cache, rope)):
        scatter_nd_update(cache.view(-1, cache.shape[-1]), slots, rows)


def transpose_batchmatmul(x: torch.Tensor, w: torch.Tensor, perm_x1: Any, perm_y: Any) -> torch.Tensor:
    return torch.bmm(x.permute(perm_x1), w).permute(perm_y)


def lightning_indexer(topk: int, log: list[Any]) -> Any:
    """npu_lightning_indexer of a model that chooses ``topk`` tokens; ``log`` gets queries and weights."""

    def choose(
        *, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor,
        actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_key: torch.Tensor,
        block_table: torch.Tensor, layout_query: str, layout_key: str, sparse_count: int, sparse_mode: int,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert (layout_query, layout_key, sparse_count, sparse_mode) == ("TND", "PA_BSND", 2048, 3)
        log.append((query.clone(), weights.float().clone()))
        out = torch.full((len(query), 1, topk), 7777, dtype=torch.int32)  # behind a context: anything
        start = 0
        for n, (stop, length) in enumerate(
            zip(actual_seq_lengths_query.tolist(), actual_seq_lengths_key.tolist(), strict=True)
        ):
            blocks = block_table[n, : -(-length // key.shape[1])].long()
            keys = key[blocks].flatten(0, 1)[:length].squeeze(1)
            chosen = torch.empty((stop - start, topk), dtype=torch.int32)
            scores = indexer_scores(query[start:stop], weights[start:stop].float(), keys)
            select_topk(scores, length - (stop - start), topk, chosen)
            out[start:stop, 0] = chosen.masked_fill(chosen < 0, 7777 if n % 2 else -1)
            start = stop
        return out, None

    return choose


def sparse_flash_attention(
    *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sparse_indices: torch.Tensor,
    scale_value: float, sparse_block_size: int, block_table: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_kv: torch.Tensor, query_rope: torch.Tensor,
    key_rope: torch.Tensor, layout_query: str, layout_kv: str, sparse_mode: int, attention_mode: int,
    return_softmax_lse: bool,
) -> torch.Tensor:  # fmt: skip
    """npu_sparse_flash_attention over pages, with the causal mask of sparse_mode 3.

    The released kernel reads a token's indices up to the first -1, and takes no tensor with gaps.
    """
    assert value.data_ptr() == key.data_ptr()
    assert (sparse_block_size, layout_query, layout_kv) == (1, "TND", "PA_BSND")
    assert (sparse_mode, attention_mode, return_softmax_lse) == (3, 2, False)
    for tensor in (key, key_rope, sparse_indices, block_table):
        assert tensor.is_contiguous()
    assert sparse_indices.dtype == block_table.dtype == torch.int32
    rows = torch.cat([key.flatten(0, 2), key_rope.flatten(0, 2)], dim=-1)
    ends = actual_seq_lengths_query.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    owner = torch.repeat_interleave(torch.arange(len(ends)), ends - starts)
    used = len(owner)  # the rest is padding
    assert used <= len(query)
    within = torch.arange(len(owner)) - starts[owner]
    limits = actual_seq_lengths_kv.long()[owner] - (ends - starts)[owner] + within + 1
    ids = sparse_indices[:used].squeeze(1).long()
    assert not torch.any((ids[:, 1:] >= 0) & (ids[:, :-1] < 0)), "indices behind a -1"
    ids = ids.masked_fill(ids >= limits.unsqueeze(1), -1)
    pages = block_table.long()[owner].gather(1, ids.clamp(min=0) // key.shape[1])
    where = (pages * key.shape[1] + ids.clamp(min=0) % key.shape[1]).masked_fill(ids < 0, -1)
    queries = torch.cat([query[:used], query_rope[:used]], dim=-1)
    out = torch.zeros(query.shape, dtype=query.dtype)
    out[:used] = sparse_mla_attend(queries, rows, where, scale_value, key.shape[-1])
    return out


CORES, PAIR_BYTES = 48, 88 << 10


def sparse_copy(
    sources: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, count: torch.Tensor, device: Any
) -> int:
    """memfabric_hybrid.offload.sparse_copy, by address, and within the limits of its kernel."""
    assert device.type == "cpu" or isinstance(device.index, int)
    assert (sources.dtype, lengths.dtype, count.dtype) == (torch.int64, torch.int32, torch.int32)
    assert int(count) == len(lengths)
    if int(count) >= CORES:  # entries of the two halves go through a core's buffer in pairs
        pairs = lengths.view(2, -1)
        assert int(pairs.sum(0).max()) <= PAIR_BYTES
        assert not torch.any(pairs[0] % 32)
    rows = zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True)
    for number, (source, target, length) in enumerate(rows):
        if number < int(count):
            ctypes.memmove(target, source, length)
    return 0


def install(monkeypatch: Any, topk: int, log: list[Any]) -> None:
    """Puts the stand-ins where vllm_ascend.attention.sfa_v1 and device_op look for them."""
    import torch_npu
    from vllm_ascend.attention import sfa_v1

    stand_ins = {
        "npu_rms_norm": rms_norm,
        "npu_rotary_mul": rotate,
        "npu_interleave_rope": interleave_rope,
        "npu_scatter_nd_update_": scatter_nd_update,
        "npu_kv_rmsnorm_rope_cache": rmsnorm_rope_cache,
        "npu_transpose_batchmatmul": transpose_batchmatmul,
        "npu_lightning_indexer": lightning_indexer(topk, log),
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(torch_npu, name, device_op(function))
    attend = device_op(sparse_flash_attention)
    monkeypatch.setattr(torch.ops._C_ascend, "npu_sparse_flash_attention", attend, raising=False)
    config = SimpleNamespace(c8_enable_reshape_optim=False)
    monkeypatch.setattr(sfa_v1, "get_ascend_config", lambda: config)
    prefetch = SimpleNamespace(maybe_prefetch_mla_or_sla_weight_in_current_stream=lambda **_: None)
    monkeypatch.setattr(sfa_v1, "get_weight_prefetch_method", lambda: prefetch)
    monkeypatch.setattr(sfa_v1, "HAS_TRITON", False)
