"""One rank of a group over the emulated HCCL: python collectives_child.py STORE RANKS RANK"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401


def main() -> None:
    store, ranks, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.npu.set_device(0)
    dist.init_process_group("hccl", init_method=f"file://{store}", world_size=ranks, rank=rank)
    total = ranks * (ranks + 1) / 2
    big = 700_000  # more than a chunk
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((big,), rank + 1, dtype=dtype, device="npu")
        dist.all_reduce(x)
        assert torch.all(x == total).item(), dtype
    mine = torch.arange(4, device="npu") + 10 * rank
    gathered = torch.empty(4 * ranks, dtype=mine.dtype, device="npu")
    dist.all_gather_into_tensor(gathered, mine)
    everything = torch.cat([torch.arange(4) + 10 * r for r in range(ranks)])
    assert torch.equal(gathered.cpu(), everything)
    part = torch.empty(4, dtype=mine.dtype, device="npu")
    dist.reduce_scatter_tensor(part, gathered.clone())
    assert torch.equal(part.cpu(), ranks * everything.view(ranks, 4)[rank])
    dist.broadcast(x := mine.clone(), src=ranks - 1)
    assert torch.equal(x.cpu(), everything[-4:])
    sent = torch.arange(ranks * 2, device="npu") + 100 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.view(ranks, 2)[:, 0].tolist() == [100 * r + 2 * rank for r in range(ranks)]
    sizes = [r + 1 for r in range(ranks)]  # rank r gets r + 1 elements of everybody
    uneven = torch.empty((rank + 1) * ranks, device="npu")
    dist.all_to_all_single(
        uneven, torch.full((sum(sizes),), float(rank), device="npu"), [rank + 1] * ranks, sizes
    )
    assert torch.equal(uneven.cpu(), torch.arange(ranks).repeat_interleave(rank + 1).float())
    if rank == 0:
        dist.send(mine, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
        assert torch.equal(x.cpu(), torch.arange(4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
