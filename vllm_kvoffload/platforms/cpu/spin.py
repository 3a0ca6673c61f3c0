"""How vLLM's processes wait for each other.

By default a reader of vLLM's message queue spins for a second after every message, and then parks. On a CPU
platform the cores it spins on are those that models compute on: while a decode engine waits for KV, its two
spinning processes can keep a prefill engine on the same machine from running at all. Here it parks sooner.

A parked reader isn't always woken: the notification is a PUB message behind a high water mark of 1, and
libzmq, which looks for room only about once a millisecond, drops the second of two in quick succession. The
message itself is in shared memory, where the reader looks again after a while: 5 s in vLLM, whose readers
hardly ever park in the middle of work. Here they do in almost every step, and so look again sooner, too.
"""

from __future__ import annotations

from vllm.distributed.device_communicators import shm_broadcast

SPIN_S = 0.001
RECHECK_MS = 20
"""What a lost notification costs at most. Looking that often costs a parked reader 0.3 % of a core."""


def shorten_spinning() -> None:
    """For queues made from now on, in this process."""
    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
