"""Spreads new pages over the machine's NUMA nodes.

All devices of a machine read the host pool, whichever node they are attached to. The kernel would place all
of a segment's pages on the node of the thread that reserves it, whose memory bandwidth they would share.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_kvoffload.log import get_logger

logger = get_logger(__name__)

STATUS = Path("/proc/self/status")
DEFAULT, INTERLEAVE = 0, 3
"""Memory policies of a thread, as in linux/mempolicy.h."""
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of the system calls set_mempolicy and get_mempolicy."""
_MASK_BITS = 1024
_Mask = ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong)))
_long = ctypes.c_long
_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: Any) -> int:
    _libc.syscall.restype = _long
    return int(_libc.syscall(_long(number), *arguments))


def allowed_nodes(status: str) -> list[int]:
    """Parses the NUMA nodes that a process may take memory of out of its /proc status; [] if unknown."""
    line = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status, re.MULTILINE)
    nodes: list[int] = []
    for part in line[1].split(",") if line else ():
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def thread_policy() -> int | None:
    """Returns this thread's memory policy, None if the kernel does not tell."""
    mode = ctypes.c_int()
    calls = _CALLS.get(platform.machine())
    if calls is None or _call(calls[1], ctypes.byref(mode), None, _long(0), None, _long(0)) != 0:
        return None
    return mode.value


@contextmanager
def interleaved(nodes: list[int] | None = None) -> Iterator[bool]:
    """Within it, pages that this thread makes are spread over the nodes; yields whether they are.

    nodes: None for all allowed ones, of which there must be two. A policy that the user has chosen
    (numactl) stays. Warns if the kernel refuses, as it does in containers.
    """
    if nodes is None:
        nodes = allowed_nodes(STATUS.read_text())
        nodes = nodes if len(nodes) > 1 else []
    if not nodes or thread_policy() != DEFAULT:
        yield False
        return
    if not _set_policy(INTERLEAVE, nodes):
        logger.warning(
            "The host pool's pages are on one NUMA node, since its policy can't be set here (%s): run the "
            "container with --cap-add SYS_NICE, or the engine under numactl --interleave=all",
            os.strerror(ctypes.get_errno()),
        )
        yield False
        return
    try:
        yield True
    finally:
        _set_policy(DEFAULT, [])


def _set_policy(mode: int, nodes: list[int]) -> bool:
    mask, width = _Mask(), 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        mask[node // width] |= 1 << node % width
    number = _CALLS[platform.machine()][0]
    argument = ctypes.byref(mask) if nodes else None
    return bool(_call(number, _long(mode), argument, _long(_MASK_BITS if nodes else 0)) == 0)
