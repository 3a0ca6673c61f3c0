"""`python -m vllm_kvoffload.demo.launch PARENT COMMAND...`: becomes COMMAND, which ends with PARENT.

The kernel sends COMMAND a SIGTERM when the thread that started this process ends, however it ends: a demo
killed with SIGKILL leaves no server behind. It is set here, not between fork and exec in the demo's own
process, where other threads may hold locks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """`arguments`: pid of the parent, absolute path of the program, its arguments. Doesn't return."""
    parent, command = int(arguments[0]), list(arguments[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # it died before the call above
        sys.exit("the parent is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
