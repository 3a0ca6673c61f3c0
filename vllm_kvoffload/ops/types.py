"""State and output buffers of the plan.

Symbols: R partitions, one for each decoding request, P slots per partition, W ways of an id, V ways of a set
(W, or W / 2 where an id has two sets), S = P / V sets, T query tokens, N requests, K top-k width.
"""

from __future__ import annotations

from enum import IntEnum
from math import prod
from typing import Final, TypeVar

import torch

from vllm_kvoffload.ops import _C
from vllm_kvoffload.policies import DEFAULT_PLACEMENT, DEFAULT_POLICY, PLACEMENT_TABLE

DEFAULT_WAYS: Final = 16
LINE_INTS: Final = 16
"""int32 per line of 64 bytes."""
# Names of the entries of PlanOut.stats, in order.
STATS: Final = ("hits", "misses", "new", "displaced", "duplicates", "invalid")

Workspace = _C.Workspace


Handle = TypeVar("Handle")


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _needed(handle: Handle | None, name: str) -> Handle:
    if handle is None:
        raise ValueError(f"{name}: must be on the CPU")
    return handle


class Kind(IntEnum):
    """Location of a top-k position's row, for compact delivery, and the meaning of the number beside it.

    The numbers are those of CANN's ``dsa_plan``.
    """

    INVALID = (
        0  # -1: a token without a request or a request without a partition; conformance mode: after a stop
    )
    POOL_HIT = 1  # slot of the hot pool
    OLD_MISS = 2  # id, to be fetched from the host pool
    DECODE_WINDOW = 3  # id, one of the step's new tokens
    FUTURE_SKIP = 4  # id, beyond the query token's own position
    NEGATIVE_STOP = 5  # id; stops the positions behind it in conformance mode only


class Residency:
    """Assignment of tokens to the slots of each partition, for one index group.

    Slot number within a partition: ``set * V + way of the set``. A token id lives in set ``id & (S - 1)``, or
    in one of the two sets that :meth:`~vllm_kvoffload.policies.Placement.sets_of` gives.

    Attributes:
        tags: int32 [R, S, V], the token id in each slot, -1 when empty.
        ages: uint8 [R, S, V], the policy's bits of each slot.
        hands: uint8 [R, S], the policy's next way per set, of the W ways of the ids whose first set it is.
        high: int32 [R], the seq_len of the partition's last plan, 0 after a reset.
        policy: its name, one of ``policies.POLICIES``.
        placement: its name, one of ``policies.PLACEMENTS``.

    In device memory it serves the device's own kernels, which take the tensors; it then has no ``handle``.

    Raises ``ValueError`` when a CPU tensor is not contiguous and of that shape and type, W is not 16 or 32, S
    is not a power of two or 1 where an id has two sets, or the policy or placement is unknown.
    """

    def __init__(
        self,
        tags: torch.Tensor,
        ages: torch.Tensor,
        hands: torch.Tensor,
        high: torch.Tensor,
        policy: str,
        placement: str = DEFAULT_PLACEMENT,
    ) -> None:
        self._handle = _C.Residency(tags, ages, hands, high, policy, placement) if _on_host(tags) else None
        self.tags: Final = tags
        self.ages: Final = ages
        self.hands: Final = hands
        self.high: Final = high
        self.policy: Final = policy
        self.placement: Final = placement

    @classmethod
    def allocate(
        cls,
        num_partitions: int,
        slots_per_partition: int,
        ways: int = DEFAULT_WAYS,
        policy: str = DEFAULT_POLICY,
        device: torch.device | str = "cpu",
        placement: str = DEFAULT_PLACEMENT,
    ) -> Residency:
        """An empty residency. ``slots_per_partition`` must be W times a power of two."""
        made = Residencies(1, num_partitions, slots_per_partition, ways, policy, device, placement)
        return made.groups[0]

    @property
    def handle(self) -> _C.Residency:
        """This object for the C++ core. Raises ``ValueError`` in device memory."""
        return _needed(self._handle, "residency")

    @property
    def num_partitions(self) -> int:
        return int(self.tags.shape[0])

    @property
    def num_sets(self) -> int:
        return int(self.tags.shape[1])

    @property
    def set_ways(self) -> int:
        """V, ways of a set."""
        return int(self.tags.shape[2])

    @property
    def ways(self) -> int:
        """W, ways of an id."""
        return self.set_ways * PLACEMENT_TABLE[self.placement].sets_per_id

    @property
    def slots_per_partition(self) -> int:
        return self.num_sets * self.set_ways

    @property
    def nbytes(self) -> int:
        """Bytes of all four tensors."""
        return sum(int(tensor.nbytes) for tensor in (self.tags, self.ages, self.hands, self.high))

    def reset_partition(self, partition: int) -> None:
        """Clears one partition for its next request. Raises ``IndexError`` if there is no such partition."""
        self.tags[partition].fill_(-1)
        self.ages[partition].zero_()
        self.hands[partition].zero_()
        self.high[partition] = 0


def _side_by_side(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Zeros [count, *shape], each contiguous and on a line of its own, as a device's kernels need it."""
    elements, line = prod(shape), LINE_INTS * 4 // dtype.itemsize
    padded = torch.zeros((count, -(-elements // line) * line), dtype=dtype, device=device)
    return padded[:, :elements].view(count, *shape)


class Residencies:
    """The empty residencies of several index groups, side by side.

    A partition is cleared in all of them by four operations, however many groups there are.

    Attributes:
        groups: one :class:`Residency` for each.

    Args:
        num_groups: G. num_partitions: R. slots_per_partition: W times a power of two.

    Raises ``ValueError`` for ways, slots or a placement that no residency can have.
    """

    def __init__(
        self,
        num_groups: int,
        num_partitions: int,
        slots_per_partition: int,
        ways: int = DEFAULT_WAYS,
        policy: str = DEFAULT_POLICY,
        device: torch.device | str = "cpu",
        placement: str = DEFAULT_PLACEMENT,
    ) -> None:
        if ways not in {16, 32}:
            raise ValueError(f"ways: must be 16 or 32, got {ways}")
        if placement not in PLACEMENT_TABLE:
            raise ValueError(f"placement: must be one of {', '.join(PLACEMENT_TABLE)}, got {placement!r}")
        whole_sets = slots_per_partition // ways
        if whole_sets < 1 or whole_sets * ways != slots_per_partition or whole_sets & (whole_sets - 1):
            raise ValueError(
                f"slots_per_partition: must be {ways} times a power of two, got {slots_per_partition}; "
                "change topk_buffer_size"
            )
        set_ways = PLACEMENT_TABLE[placement].set_ways(ways)
        shape = (num_partitions, slots_per_partition // set_ways, set_ways)
        self._tags = _side_by_side(num_groups, shape, torch.int32, device).fill_(-1)
        self._ages = _side_by_side(num_groups, shape, torch.uint8, device)
        self._hands = _side_by_side(num_groups, shape[:2], torch.uint8, device)
        self._high = _side_by_side(num_groups, shape[:1], torch.int32, device)
        self.groups: Final = [
            Residency(tags, ages, hands, high, policy, placement)
            for tags, ages, hands, high in zip(self._tags, self._ages, self._hands, self._high, strict=True)
        ]

    def reset_partition(self, partition: int) -> None:
        """Clears one partition in every group for its next request.

        Raises ``IndexError`` if there is no such partition.
        """
        self._tags[:, partition].fill_(-1)
        self._ages[:, partition].zero_()
        self._hands[:, partition].zero_()
        self._high[:, partition].zero_()


class PlanOut:
    """Output buffers of :func:`dsa_plan`, allocated once for the largest step.

    Only the step's part is written. In device memory they serve the device's kernels and have no ``handle``.

    Attributes:
        slots: int32 [T, K], the slot of every top-k position; -1 for padding, negative or future ids.
        new_slots: int32 [T], the slot given to each of the step's new tokens; -1: none.
        miss_ids: int32 [N, M], distinct ids to fetch, the first ``miss_counts[n]`` of request n.
        miss_slots: int32 [N, M], the slot each of them goes to.
        miss_counts: int32 [N].
        stats: int64 [6], see ``STATS``; of the last call.
        compact: whether the buffers of compact delivery exist. Else they have no elements.
        kinds: int32 [T, K, 2], (kind, number) of every top-k position, see ``Kind``.
        miss_positions: int32 [N, M], where each miss occurs first: ``t * K + k``, with t counted from the
            request's first token.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        topk: int,
        max_query_len: int,
        *,
        compact: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        def none(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        capacity = max_query_len * topk
        self.compact: Final = compact
        self.slots: Final = none(max_tokens, topk)
        self.new_slots: Final = none(max_tokens)
        self.miss_ids: Final = none(max_requests, capacity)
        self.miss_slots: Final = none(max_requests, capacity)
        self.miss_counts: Final = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.stats: Final = torch.zeros(len(STATS), dtype=torch.int64, device=device)
        self.kinds: Final = none(max_tokens if compact else 0, topk, 2)
        self.miss_positions: Final = none(max_requests if compact else 0, capacity)
        self._handle = _C.PlanOut(*self.buffers) if _on_host(self.slots) else None

    @property
    def handle(self) -> _C.PlanOut:
        """This object for the C++ core. Raises ``ValueError`` in device memory."""
        return _needed(self._handle, "out")

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """All buffers, in the order listed above."""
        return (
            self.slots,
            self.new_slots,
            self.miss_ids,
            self.miss_slots,
            self.miss_counts,
            self.stats,
            self.kinds,
            self.miss_positions,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(buffer.nbytes) for buffer in self.buffers)
