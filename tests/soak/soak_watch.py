"""A soak's measurements: memory, threads, descriptors of every process, and resources reported by engines."""

from __future__ import annotations

import csv
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tests.faults.fault_cluster import HELD, PROXY_HELD, metrics
from tests.soak.soak_fleet import Fleet
from vllm_kvoffload.demo.processes import session_and_descendants

EVERY_S = 10.0
FLAT = 0.02
LEAST_SPAN_S = 300.0
"""A process that lived for less after its warm-up is not judged."""
LEAST_HALF_S = 900.0
FEW_BYTES = 1 << 20
"""Growth that may be a handful of pages."""
PATIENCE_S = 60.0
"""By then an engine without requests must be quiet."""
STILL_RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class Sample:
    """A process at a time. second: of the soak; life: see `Life.label`; age: seconds since its start.

    own: bytes of anonymous and shared memory, shared ones divided among the sharers. What it maps of files
    changes with the other processes of the machine, and is not in it; `rss` has everything.
    """

    second: float
    life: str
    process: str
    pid: int
    age: float
    rss: int
    own: int
    threads: int
    files: int


def memory(pid: int) -> tuple[int, int]:
    """rss and own bytes of a process. Raises OSError when it is gone."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    found = {name: 1024 * int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return found["Rss"], found["Pss_Anon"] + found["Pss_Shmem"]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of Theil and Sen through (x, y): the median of all pairs' slopes. 0.0 for one point."""
    pairs = [(d - b) / (c - a) for n, (a, b) in enumerate(points) for c, d in points[n + 1 :] if c != a]
    return statistics.median(pairs) if pairs else 0.0


@dataclass(frozen=True)
class Growth:
    """Of a process after its warm-up. rate: bytes an hour; share: growth over the span, of the median.

    late_share: the same over the span's second half; None if that is shorter than `LEAST_HALF_S`. What
    grows in steps, each at a fault's first occurrence, and then no more, is no leak.
    """

    life: str
    process: str
    minutes: float
    median: float
    rate: float
    share: float
    late_share: float | None
    judged: bool

    @property
    def flat(self) -> bool:
        grown = self.rate / 60 * self.minutes
        late = self.late_share
        settled = late is not None and (late <= FLAT / 8 or late * self.median <= FEW_BYTES)
        return not self.judged or self.share <= FLAT or grown <= FEW_BYTES or settled


def growth(samples: Sequence[Sample], warm_up_s: float) -> list[Growth]:
    """Of each process that has samples."""
    by_process: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        by_process.setdefault((sample.life, sample.pid), []).append(sample)
    found = []
    for (life, _pid), all_of_it in by_process.items():
        process = all_of_it[-1].process  # vLLM's take their names a while after their start
        warm = [sample for sample in all_of_it if sample.age >= warm_up_s]
        kept = warm if len(warm) > 1 else all_of_it
        span = kept[-1].second - kept[0].second
        rate = slope([(sample.second, sample.own) for sample in kept])
        median = statistics.median(sample.own for sample in kept)
        judged = kept is warm and span >= min(LEAST_SPAN_S, warm_up_s)
        share = rate * span / median if median else 0.0
        late = _late_share(kept, median)
        found.append(Growth(life, process, span / 60, median, rate * 3600, share, late, judged))
    return found


def _late_share(kept: Sequence[Sample], median: float) -> float | None:
    middle = (kept[0].second + kept[-1].second) / 2
    late = [(sample.second, sample.own) for sample in kept if sample.second >= middle]
    span = late[-1][0] - late[0][0]
    return slope(late) * span / median if span >= LEAST_HALF_S and median else None


class Watch:
    """A thread that samples all processes, and writes two CSV files: processes and held resources."""

    def __init__(self, fleet: Fleet, folder: Path, begun: float) -> None:
        self._fleet, self._begun = fleet, begun
        self.samples: list[Sample] = []
        self._processes = (folder / "processes.csv").open("w", newline="", encoding="utf-8")
        self._held = (folder / "held.csv").open("w", newline="", encoding="utf-8")
        self._process_rows = csv.DictWriter(self._processes, [field.name for field in fields(Sample)])
        self._process_rows.writeheader()
        self._held_rows = csv.writer(self._held)
        self._held_rows.writerow(["second", "server", "series", "value"])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * EVERY_S)
        self._processes.close()
        self._held.close()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            for sample in self.look():
                self.samples.append(sample)
                self._process_rows.writerow(asdict(sample))
            for server, found in self.held(5.0).items():
                second = round(time.monotonic() - self._begun, 1)
                self._held_rows.writerows([second, server, *item] for item in found.items())
            self._processes.flush()
            self._held.flush()

    def look(self) -> list[Sample]:
        """Of every process, now."""
        found = []
        for life in list(self._fleet.lives.values()):
            now = time.monotonic()
            for process, name in session_and_descendants(life.server.pid).items():
                folder = Path(f"/proc/{process.pid}")
                try:
                    rss, own = memory(process.pid)
                    threads = len(list((folder / "task").iterdir()))
                    files = len(list((folder / "fd").iterdir()))
                except OSError:  # it has ended meanwhile
                    continue
                second, age = round(now - self._begun, 1), round(now - life.begun, 1)
                found.append(Sample(second, life.label, name, process.pid, age, rss, own, threads, files))
        return found

    def held(self, timeout_s: float = 30.0) -> dict[str, dict[str, float]]:
        """Series that must be 0 at rest, by server; of those that answer."""
        found = {}
        for name in self._fleet.names:
            wanted = PROXY_HELD if name == "proxy" else (*STILL_RUNNING, *HELD)
            try:
                said = metrics(self._fleet.ports[name], timeout_s)
            except (OSError, ValueError):
                continue
            found[name] = {series: said[series] for series in wanted if series in said}
        return found

    def busy(self) -> str:
        """Describes held resources, "" for none."""
        found = self.held()
        silent = [name for name in self._fleet.names if name not in found]
        if silent:
            return f"{', '.join(silent)}: no metrics"
        items = [f"{server}: {series} = {value:g}" for server, of in found.items() for series, value in of.items() if value]  # fmt: skip # noqa: E501
        return "; ".join(items)

    def wait_quiet(self, seconds: float = PATIENCE_S) -> str:
        """Describes resources still held at the deadline, "" for none."""
        return wait_empty(self.busy, seconds)


def wait_empty(problem: Callable[[], str], seconds: float) -> str:
    """Waits until there is no problem; returns it when there still is one then."""
    end = time.monotonic() + seconds
    while said := problem():
        if time.monotonic() > end:
            return said
        time.sleep(0.5)
    return ""


def more_than(base: Mapping[str, int], now: Mapping[str, int], allowed: int) -> list[str]:
    """Counts that have grown by more than `allowed`, one line each."""
    return [
        f"{name}: {count} after {base[name]}"
        for name, count in now.items()
        if name in base and count > base[name] + allowed
    ]
