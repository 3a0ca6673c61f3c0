"""Reference of :mod:`vllm_kvoffload.ops.conformance`: CANN's plan and install, position by position."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvoffload.ops.conformance import CHUNKS, ConformanceOut
from vllm_kvoffload.ops.oracle.copies import dsa_serve_compact as serve
from vllm_kvoffload.ops.types import Kind, Residency

__all__ = ["install_slots", "plan", "serve"]

WAYS = 16
Record = tuple[int, int, int, int]  # (set, id, query, position)


def chunk_bounds(width: int) -> list[tuple[int, int]]:
    size = -(-width // CHUNKS)
    return [(min(o * size, width), min((o + 1) * size, width)) for o in range(CHUNKS)]


def _find(residency: Residency, partition: int, token: int, id_range: int) -> int:
    """Slot of a resident id below ``id_range``, or -1."""
    home = token & (residency.num_sets - 1)
    ways = (residency.tags[partition, home] == token).nonzero()
    return home * WAYS + int(ways[0]) if token < id_range and len(ways) else -1


def plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    out: ConformanceOut,
) -> None:
    """Kinds, records and counts of every query token; the residency is only read."""
    out.kinds[: len(topk)] = torch.tensor([Kind.INVALID, -1], dtype=torch.int32)
    out.actual[: len(topk)] = 0
    for n, partition in enumerate(rows.tolist()):
        out.record_counts[n] = 0
        first, last = query_start_loc[n : n + 2].tolist()
        length, query_len = int(seq_lens[n]), last - first
        for s in range(query_len if partition >= 0 else 0):
            ids = topk[first + s].tolist()
            limit = length - (query_len - 1 - s) - 1
            oldest_new = max(length - query_len - 1, 0) + 1  # ids from here on are this step's
            for chunk, (begin, end) in enumerate(chunk_bounds(len(ids))):
                stopped = begin > 0 and ids[begin - 1] < 0
                for k in range(begin, end):
                    token = ids[k]
                    if stopped:
                        continue
                    if token < 0:
                        kind, index, stopped = Kind.NEGATIVE_STOP, token, True
                    elif token > limit:
                        kind, index = Kind.FUTURE_SKIP, token
                    elif token >= oldest_new:
                        kind, index = Kind.DECODE_WINDOW, token
                    elif (slot := _find(residency, partition, token, id_range)) >= 0:
                        kind, index = Kind.POOL_HIT, slot
                    else:
                        kind, index = Kind.OLD_MISS, token
                        home = token & (residency.num_sets - 1)
                        record = torch.tensor([home, token, s, k], dtype=torch.int32)
                        out.records[n, s, chunk, int(out.record_counts[n, s, chunk])] = record
                        out.record_counts[n, s, chunk] += 1
                    out.kinds[first + s, k] = torch.tensor([kind, index], dtype=torch.int32)
            leading = next((k for k, token in enumerate(ids) if token < 0), len(ids))
            out.actual[first + s] = sum(token <= limit for token in ids[:leading])


def _records(out: ConformanceOut, n: int, query_len: int) -> Iterator[Record]:
    for s in range(query_len):
        for chunk in range(CHUNKS):
            count = min(max(int(out.record_counts[n, s, chunk]), 0), out.chunk_capacity)
            for record in out.records[n, s, chunk, :count].tolist():
                yield tuple(record)


def install_slots(
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    out: ConformanceOut,
    *,
    metadata_update: bool,
) -> None:
    """Replays the FIFO pointers over the records: the slot of each id's first one."""
    width = out.kinds.shape[1]
    for n, partition in enumerate(rows.tolist()):
        out.miss_counts[n] = 0
        query_len = int(query_start_loc[n + 1]) - int(query_start_loc[n])
        if partition < 0:
            continue
        hands = residency.hands[partition] if metadata_update else residency.hands[partition].clone()
        seen: set[int] = set()
        for home, token, s, k in _records(out, n, query_len):
            in_range = (
                0 <= home < residency.num_sets
                and 0 <= token < id_range
                and 0 <= s < query_len
                and 0 <= k < width
            )
            if not in_range or token in seen:
                continue
            seen.add(token)
            way = int(hands[home]) & (WAYS - 1)
            hands[home] = (way + 1) & (WAYS - 1)
            if metadata_update:
                residency.tags[partition, home, way] = token
            at = int(out.miss_counts[n])
            out.miss_slots[n, at] = home * WAYS + way
            out.miss_positions[n, at] = s * width + k
            out.miss_counts[n] += 1
