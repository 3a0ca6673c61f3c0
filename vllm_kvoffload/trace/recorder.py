"""Records a trace in a running engine: copies on the engine's thread, encodes and writes on another."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.trace.format import Ids, TraceHeader
from vllm_kvoffload.trace.writer import TraceWriter

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

QUEUE_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 60.0
MAX_SPARES = 16  # buffers kept for later calls, because new memory costs a page fault every 4 KiB


@dataclass
class _Call:
    memory: Ids  # topk is a view of it
    group: int
    step: int
    topk: Ids
    starts: Ids
    seq_lens: Ids
    request_ids: tuple[str, ...]
    dropped: int  # calls dropped before this one, in all


class TraceRecorder:
    """Writes an engine's top-k ids to one file without ever making the engine wait.

    At most ``queue_bytes`` of copies wait for the writing thread; further calls are dropped, counted in the
    file and logged. A failed write (such as a full disk) ends the recording with one log line, never the
    engine. Data flushed to the operating system survives a killed process; the thread flushes whenever its
    queue is empty.
    """

    def __init__(self, writer: TraceWriter, queue_bytes: int = QUEUE_BYTES) -> None:
        self._writer = writer
        self._queue_bytes = queue_bytes
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._spares: deque[Ids] = deque(maxlen=MAX_SPARES)
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped = 0
        self._steps: dict[int, int] = {}
        self._closed = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kvoffload-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def open(cls, path: str | Path, header: TraceHeader, *, queue_bytes: int = QUEUE_BYTES) -> TraceRecorder:
        """Makes a recorder with a new file. Raises TraceError if the file exists or can't be created."""
        recorder = cls(TraceWriter(path, header), queue_bytes)
        logger.info("Recording the indexers' top-k indices in %s", path)
        return recorder

    @property
    def dropped(self) -> int:
        """Number of calls dropped so far."""
        return self._dropped

    def record(
        self,
        group: int,
        topk: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        request_ids: Sequence[str],
    ) -> None:
        """Records one step's top-k ids of one index group. Not thread-safe. Copies its arguments.

        Args:
            group: index group.
            topk: int32 [at least T, K] in host memory, top-k ids of each query token, below 0: padding.
                Tokens from ``query_start_loc[N]`` on are padding too.
            query_start_loc: int32 [N + 1] in host memory, from 0.
            seq_lens: int32 [N] in host memory, tokens including this step's.
            request_ids: [N], unique.
        """
        if self._closed:
            return
        try:
            self._take(group, topk, query_start_loc, seq_lens, request_ids)
        except Exception as error:  # such as no memory: a trace must not end the engine
            with self._lock:
                self._dropped += 1
                if not self._failed:
                    self._fail(error)

    def _take(
        self,
        group: int,
        topk: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        request_ids: Sequence[str],
    ) -> None:
        step = self._steps.get(group, 0)
        self._steps[group] = step + 1
        starts = query_start_loc.numpy()
        chosen = topk.numpy()[: int(starts[-1])]
        with self._lock:
            if self._failed or self._waiting_bytes + chosen.nbytes > self._queue_bytes:
                self._dropped += 1
                return
            self._waiting_bytes += chosen.nbytes
        memory = self._memory(chosen.size)
        copied = memory[: chosen.size].reshape(chosen.shape)
        np.copyto(copied, chosen)
        lengths = seq_lens.numpy().copy()
        names = tuple(request_ids)
        self._queue.put(_Call(memory, group, step, copied, starts.copy(), lengths, names, self._dropped))

    def _memory(self, size: int) -> Ids:
        """int32 [at least size], used before where possible."""
        try:
            spare = self._spares.pop()
        except IndexError:
            return np.empty(size, np.int32)
        return spare if size <= len(spare) <= 2 * size else np.empty(size, np.int32)

    def close(self) -> None:
        """Writes the queued steps and ends the file. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("The trace %s is not complete: its disk takes no data", self._writer.path)

    # ------------------------------------------------------------------------------------ the writing thread

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            written = False
            if not self._failed:
                try:
                    self._write(call)
                    written = True
                except Exception as error:
                    self._fail(error)
            with self._lock:
                self._waiting_bytes -= call.topk.nbytes
                self._dropped += not written
            self._spares.append(call.memory)
        if self._failed:
            self._writer.abandon()
            return
        try:
            self._note_drops(self._dropped)
            self._writer.close()
        except Exception as error:
            self._fail(error)
            self._writer.abandon()
            return
        logger.info(
            "Trace %s: %d steps recorded, %d dropped",
            self._writer.path,
            self._writer.steps,
            self._writer.dropped,
        )

    def _write(self, call: _Call) -> None:
        self._note_drops(call.dropped)
        self._writer.write(call.group, call.step, call.topk, call.starts, call.seq_lens, call.request_ids)
        if self._queue.empty():
            self._writer.flush()

    def _note_drops(self, dropped: int) -> None:
        count = dropped - self._writer.dropped
        if count:
            if not self._writer.dropped:
                logger.warning(
                    "The trace %s has gaps: its writer can't keep up with the engine", self._writer.path
                )
            self._writer.write_dropped(count)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        logger.error("Recording in %s ended after %d steps: %s", self._writer.path, self._writer.steps, error)
