"""The baseline's selection: keeps only the rows selected in the previous step, without a pool."""

from __future__ import annotations

import torch

from vllm_kvoffload.ops.oracle.copies import host_row

EMPTY = -1


def distinct_valid(ids: list[int], limit: int) -> list[int]:
    """The ids in 0..limit, each once, in order of first occurrence."""
    return list(dict.fromkeys(token for token in ids if 0 <= token <= limit))


def arrange(previous: list[int], wanted: list[int], stable: int) -> tuple[list[int], dict[int, int]]:
    """Places of the wanted ids: ``(id at each place, {new place: old place} of those that move)``.

    ``previous`` are the ids at their places. A wanted id below ``stable`` is a hit (the rows of the others
    may belong to rejected drafts); should it stand there twice, at its first place. Hits at places that the
    new selection still has stay. The others move to the lowest free places, in order of place: no place is
    read after it was written. The other wanted ids take the remaining places, ascending.
    """
    old_place: dict[int, int] = {}
    for place, token in enumerate(previous):
        if token in wanted and token < stable:
            old_place.setdefault(token, place)
    count = len(wanted)
    ids = [EMPTY] * count
    for token, place in old_place.items():
        if place < count:
            ids[place] = token
    free = iter([place for place in range(count) if ids[place] == EMPTY])
    moves = {next(free): place for place in old_place.values() if place >= count}
    for place, old in moves.items():
        ids[place] = previous[old]
    for token in wanted:
        if token not in old_place:
            ids[next(free)] = token
    return ids, moves


def gather_selection(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    host: torch.Tensor,
    block_table: torch.Tensor,
    new_rows: torch.Tensor,
    selection: torch.Tensor,
    status: torch.Tensor,
    lengths: torch.Tensor,
) -> int:
    """Brings each query's selection from the previous step's to this step's, see :func:`arrange`.

    ``status[r, s]`` then holds the ids by place, -1 behind them and their number last. Queries of a partition
    that this step does not have get a number of 0: a draft accepted later must not meet the row of one
    rejected earlier. Requests without a partition or without tokens change nothing; their tokens and those
    past the last request get a length of 0.
    """
    width = topk.shape[1]
    lengths[: len(topk)] = 0
    fetched = 0
    for n, partition in enumerate(rows.tolist()):
        first, last = query_start_loc[n : n + 2].tolist()
        if partition < 0 or first == last:
            continue
        stable = int(seq_lens[n]) - (last - first)
        for s, t in enumerate(range(first, last)):
            wanted = distinct_valid(topk[t].tolist(), stable + s)
            previous = status[partition, s, : int(status[partition, s, width])].tolist()
            ids, moves = arrange(previous, wanted, stable)
            for place, token in enumerate(ids):
                if place in moves:
                    selection[partition, s, place] = selection[partition, s, moves[place]].clone()
                elif token >= stable:
                    selection[partition, s, place] = new_rows[first + token - stable]
                elif place >= len(previous) or previous[place] != token:
                    selection[partition, s, place] = host_row(host, block_table[n], token)
                    fetched += host.shape[2]
            status[partition, s] = EMPTY
            status[partition, s, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            status[partition, s, width] = len(ids)
            lengths[t] = len(ids)
        status[partition, last - first :, width] = 0
    return fetched


def gather_reuse(
    status: torch.Tensor, rows: torch.Tensor, query_start_loc: torch.Tensor, lengths: torch.Tensor
) -> None:
    """The lengths of the selections as they are, for draft steps that keep the top-k of the first one."""
    lengths[:] = 0
    for n, partition in enumerate(rows.tolist()):
        first, last = query_start_loc[n : n + 2].tolist()
        for s, t in enumerate(range(first, last if partition >= 0 else first)):
            lengths[t] = status[partition, s, -1]
