"""How long vLLM's processes spin while they wait for each other.

By default they spin for a second after every message. On a CPU platform the cores they spin on are those that
models compute on: while a decode engine waits for KV, its two spinning processes can keep a prefill engine on
the same machine from running at all.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SPIN_S = 0.001


def shorten_spinning() -> None:
    """For queues made from now on, in this process."""
    SpinCondition.__init__.__defaults__ = (SPIN_S,)
