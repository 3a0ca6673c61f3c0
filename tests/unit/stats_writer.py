"""Worker processes that publish metrics."""

from __future__ import annotations

import subprocess
import sys

WRITER = """
import os, sys, time
from vllm_kvoffload.metrics import DECODE, OFFLOAD, PREFILL, StatsChannel
from vllm_kvoffload.sparse.stats import OffloadStats

instance, dp, tp, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
channel = StatsChannel(OFFLOAD, instance, dp, tp)
channel.publish(OffloadStats(decode_steps=5, hits=90 + tp, misses=10, fetched_bytes=1 << 40), live_rows=2)
if mode == "fork":
    child = os.fork()
    if not child:
        channel.publish({"hits": 1})
        time.sleep(60)
    print(child, flush=True)
print("ready", flush=True)
step = 0
while mode == "hammer":
    step += 1
    channel.publish({field.key: step for field in OFFLOAD.fields})
for line in sys.stdin:
    exec(line)
"""


class Writer:
    """A worker process below this one; `send` runs a line of Python in it."""

    def __init__(self, instance: str, dp: int = 0, tp: int = 0, mode: str = "wait") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, instance, str(dp), str(tp), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.child = int(self._line()) if mode == "fork" else 0
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(code + "; print('done', flush=True)\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
