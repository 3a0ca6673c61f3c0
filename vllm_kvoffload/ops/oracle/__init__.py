"""Plain Python and numpy reference of every op: the specification that the compiled core must equal.

Same signatures as :mod:`vllm_kvoffload.ops`; :mod:`vllm_kvoffload.ops.oracle.conformance` is the reference of
:mod:`vllm_kvoffload.ops.conformance`. Written for reading, not for speed: no vectorisation, no scratch kept
between calls, scans where the core keeps lists. Of the reference ops, only the plan checks its arguments.
"""

from vllm_kvoffload.ops.oracle.copies import (
    copy_spans,
    dsa_install,
    dsa_serve,
    dsa_serve_compact,
    host_read,
    host_row,
    host_write,
    write_rows,
)
from vllm_kvoffload.ops.oracle.gather import gather_reuse, gather_selection
from vllm_kvoffload.ops.oracle.plan import dsa_plan

__all__ = [
    "copy_spans",
    "dsa_install",
    "dsa_plan",
    "dsa_serve",
    "dsa_serve_compact",
    "gather_reuse",
    "gather_selection",
    "host_read",
    "host_row",
    "host_write",
    "write_rows",
]
