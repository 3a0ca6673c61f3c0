"""The baselines of ``native/baselines.cpp``, built with this machine's compiler for this machine."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).parent / "native" / "baselines.cpp"


@cache
def library() -> ctypes.CDLL:
    """The compiled baselines; -march=native, which the ops' portable build does not have."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "baselines.so"
        compiler = os.environ.get("CXX", "c++")
        flags = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(binary)], check=True)
        loaded = ctypes.CDLL(str(binary))
    loaded.exact_lru_create.restype = ctypes.c_void_p
    return loaded


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class ExactLRU:
    """Exact LRU over each row's whole pool, as a plan without sets does it: one scan of P slots per query."""

    def __init__(self, rows: int, slots: int, topk: int, context: int) -> None:
        self._create_arguments = [ctypes.c_int64(value) for value in (rows, slots, topk, context)]
        self._handle = ctypes.c_void_p(library().exact_lru_create(*self._create_arguments))
        self._rows = ctypes.c_int64(rows)
        self.current = np.empty((rows, topk), np.int32)
        self.miss_ids = np.empty((rows, topk), np.int32)
        self.miss_slots = np.empty((rows, topk), np.int32)
        self.miss_counts = np.empty(rows, np.int32)
        self._outputs = [
            _pointer(a) for a in (self.current, self.miss_ids, self.miss_slots, self.miss_counts)
        ]

    def __del__(self) -> None:
        library().exact_lru_destroy(self._handle)

    def plan(self, topk: npt.NDArray[np.int32], stable: npt.NDArray[np.int32]) -> None:
        """int32 [rows, topk] ids and int32 [rows] stable lengths, both contiguous."""
        library().exact_lru_plan(self._handle, self._rows, _pointer(topk), _pointer(stable), *self._outputs)


def copy_rows(source: npt.NDArray[np.uint64], target: npt.NDArray[np.uint64], row_bytes: int) -> None:
    """memcpy of rows between two equally long lists of addresses."""
    count, size = ctypes.c_int64(len(source)), ctypes.c_int64(row_bytes)
    library().copy_rows(_pointer(source), _pointer(target), count, size)
