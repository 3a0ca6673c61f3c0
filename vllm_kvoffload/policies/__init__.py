"""Replacement policies: which of a hot-pool set's slots gives way to a missing row.

One module for each, and the table that the options, the operators, the oracle and the trace simulator read.
To add a policy, add a module here and its two lines below, and a header in ``csrc/policies`` with its two
lines in ``policies.h``, in the same order. In which sets an id may be resident is the *placement*, in
:mod:`vllm_kvoffload.policies.placement`. Needs neither torch nor numpy.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vllm_kvoffload.policies import clock, fifo, rrip, rrip3
from vllm_kvoffload.policies.placement import DEFAULT_PLACEMENT, PLACEMENT_TABLE, PLACEMENTS, Placement
from vllm_kvoffload.policies.policy import Policy

TABLE: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            fifo.POLICY,
            clock.POLICY,
            rrip.POLICY,
            rrip3.POLICY,
        )
    }
)
POLICIES: Final = tuple(TABLE)
DEFAULT_POLICY: Final = "rrip"

__all__ = [
    "DEFAULT_PLACEMENT",
    "DEFAULT_POLICY",
    "PLACEMENTS",
    "PLACEMENT_TABLE",
    "POLICIES",
    "TABLE",
    "Placement",
    "Policy",
]
