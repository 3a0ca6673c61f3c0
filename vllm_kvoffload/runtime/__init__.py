"""Device abstraction: streams, events, bounded waits, and who owns the threads behind them.

Owns every stream and event of the project. `base` is the interface, `cpu` runs side streams on threads,
`delay` makes them overtake each other on purpose. Never touches tensors, KV layouts or requests: a task is
just a function.
"""

from vllm_kvoffload.runtime.base import (
    Event,
    Runtime,
    RuntimeClosedError,
    RuntimeFault,
    Stream,
    StreamFullError,
    TaskFailedError,
    WaitTimeoutError,
)
from vllm_kvoffload.runtime.cpu import CpuRuntime
from vllm_kvoffload.runtime.delay import DelayPlan

__all__ = [
    "CpuRuntime",
    "DelayPlan",
    "Event",
    "Runtime",
    "RuntimeClosedError",
    "RuntimeFault",
    "Stream",
    "StreamFullError",
    "TaskFailedError",
    "WaitTimeoutError",
]
