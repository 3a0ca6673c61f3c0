"""The sparse-decode operators: residency plan, row copies, and their plain-Python oracle.

Owns the typed front end of the C++ core (``csrc/cpu``) and its state types. Never touches streams, vLLM or
model code: callers pass contiguous CPU tensors and decide where and when a call runs. Every call
releases the GIL, checks its arguments before touching memory and raises ``ValueError`` naming the argument at
fault. CANN's own plan and install, for comparison, are in :mod:`vllm_kvoffload.ops.conformance`.
"""

from vllm_kvoffload.ops.native import (
    available_isas,
    copy_spans,
    dsa_install,
    dsa_plan,
    dsa_serve,
    dsa_serve_compact,
    gather_reuse,
    gather_selection,
    host_read,
    host_write,
    isa,
    set_isa,
    write_rows,
)
from vllm_kvoffload.ops.types import (
    DEFAULT_WAYS,
    STATS,
    Kind,
    PlanOut,
    Residencies,
    Residency,
    Workspace,
)
from vllm_kvoffload.policies import DEFAULT_PLACEMENT, DEFAULT_POLICY, PLACEMENTS, POLICIES

__all__ = [
    "DEFAULT_PLACEMENT",
    "DEFAULT_POLICY",
    "DEFAULT_WAYS",
    "PLACEMENTS",
    "POLICIES",
    "STATS",
    "Kind",
    "PlanOut",
    "Residencies",
    "Residency",
    "Workspace",
    "available_isas",
    "copy_spans",
    "dsa_install",
    "dsa_plan",
    "dsa_serve",
    "dsa_serve_compact",
    "gather_reuse",
    "gather_selection",
    "host_read",
    "host_write",
    "isa",
    "set_isa",
    "write_rows",
]
