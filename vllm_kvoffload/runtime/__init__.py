"""Device abstraction: streams, events and bounded waits, and the threads behind them.

Owns every stream and event of the project. `base` is the interface; `cpu` runs side streams on threads, `npu`
on threads with a device stream; `delay` perturbs their timing in tests; `ranks` is the barrier of TP ranks.
Never touches KV layouts or requests: a task is just a function.
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
from vllm_kvoffload.runtime.cpu import CPURuntime
from vllm_kvoffload.runtime.delay import DelayPlan

__all__ = [
    "CPURuntime",
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
