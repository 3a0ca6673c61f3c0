"""Shortens the busy-waiting of vLLM's processes for each other's messages.

By default a reader of vLLM's message queue spins for a second after every message, then parks. On a CPU
platform it spins on the cores that compute models: while a decode engine waits for KV, its two spinning
processes can starve a prefill engine on the same machine. Here it parks sooner.

A parked reader is not always woken: the notification is a PUB message with a high-water mark of 1, and
libzmq, which checks for room only about once a millisecond, drops the second of two in quick succession.
The message itself is in shared memory, which the reader rechecks periodically: every 5 s in vLLM, whose
readers rarely park during work. Here they park in almost every step, so they recheck sooner as well.

Only for engines that are served by this platform. An engine's child processes make queues before they know
its configuration, so the choice is passed to them in an environment variable.
"""

from __future__ import annotations

import os

SPIN_S = 0.001
RECHECK_MS = 20
"""Maximum cost of a lost notification. This recheck interval costs a parked reader 0.3 % of a core."""


CHOSEN = "KVOFFLOAD_SHORT_SPIN"


def choose_spinning(shorter: bool) -> None:
    """Decides for the queues of an engine that this process is about to start."""
    if shorter:
        os.environ[CHOSEN] = "1"
        shorten_spinning()
    else:
        os.environ.pop(CHOSEN, None)


def shorten_spinning_if_chosen() -> None:
    """Follows the choice of the process that started this one."""
    if os.environ.get(CHOSEN) == "1":
        shorten_spinning()


def shorten_spinning() -> None:
    """Applies to queues created from now on in this process."""
    # Imported late: it needs vLLM's platform, which imports this module.
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
