"""Metrics: layout, publishing and reading across processes, the collector, the lines in the log."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import struct
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.stats_writer import Writer
from vllm_kvoffload.metrics import StatsChannel, WorkerStats, find_stats
from vllm_kvoffload.metrics import collector as collector_module
from vllm_kvoffload.metrics import reader as reader_module
from vllm_kvoffload.metrics.collector import OffloadCollector
from vllm_kvoffload.metrics.fields import DECODE, FIELD_SETS, OFFLOAD, PREFILL, receive_seconds
from vllm_kvoffload.metrics.layout import Field, FieldSet, Histogram, parse_link
from vllm_kvoffload.metrics.reader import StatsFinder
from vllm_kvoffload.metrics.report import IntervalReport
from vllm_kvoffload.sparse.stats import OffloadStats

pytestmark = pytest.mark.timeout(120)

imports_vllm = pytest.mark.slow  # seconds by itself, and more on a busy machine

FIELDS = OFFLOAD.fields
ZEROS = [0] * len(FIELDS)


def stats_files() -> list[str]:
    """Memory files of metrics that this very process holds."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if parse_link(link)]


def scrape(collector: OffloadCollector) -> dict[tuple[str, str], float]:
    """Samples by name and rank, through the text that Prometheus gets."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


# ------------------------------------------------------------------------------------------------- layout


def test_every_counter_of_the_worker_has_a_field() -> None:
    counters = tuple(field.name for field in FIELDS if field.kind == "counter")
    assert tuple(field.name for field in dataclasses.fields(OffloadStats)) == counters


def file_of(*slots: tuple[int, list[int]]) -> bytes:
    data = bytearray(OFFLOAD.file_bytes)
    header = OFFLOAD.pack_header(17, 99)
    data[: len(header)] = header
    for sequence, values in slots:
        offset, slot = OFFLOAD.pack_slot(sequence, values)
        data[offset : offset + len(slot)] = slot
    return bytes(data)


def test_newest_whole_slot_is_read() -> None:
    ones, twos = [1] * len(FIELDS), [2] * len(FIELDS)
    for older, newer in ((4, 5), (5, 6)):
        record = OFFLOAD.parse(file_of((older, ones), (newer, twos)))
        assert record is not None
        assert (record.pid, record.created_ns, record.values) == (17, 99, tuple(twos))


def test_a_slot_cut_anywhere_falls_back_to_the_other() -> None:
    before = file_of((4, [7] * len(FIELDS)), (3, ZEROS))
    offset, slot = OFFLOAD.pack_slot(5, [-8] * len(FIELDS))
    for cut in range(OFFLOAD.slot_bytes):
        torn = bytearray(before)
        torn[offset : offset + cut] = slot[:cut]
        record = OFFLOAD.parse(bytes(torn))
        assert record is not None
        # From the last byte of the checksum on, the slot is whole: what follows is padding.
        assert record.values[0] == (7 if cut < OFFLOAD.slot_bytes - 4 else -8), cut


def test_foreign_content_is_refused() -> None:
    good = file_of((0, ZEROS), (1, ZEROS))
    assert OFFLOAD.parse(good) is not None
    assert OFFLOAD.parse(b"") is None
    assert OFFLOAD.parse(good[:-1]) is None
    for offset in (0, 8):  # magic, schema
        bad = bytearray(good)
        bad[offset] ^= 1
        assert OFFLOAD.parse(bytes(bad)) is None
    assert OFFLOAD.parse(file_of()[:40] + bytes([1]) * (OFFLOAD.file_bytes - 40)) is None  # both slots broken


@pytest.mark.parametrize("instance_id", ["abc", "a:dp1:tp2", "with space (deleted)", "", "line\nend"])
def test_link_names_round_trip(instance_id: str) -> None:
    link = f"/memfd:{DECODE.file_name(instance_id, 3, 12)} (deleted)"
    assert parse_link(link) == ("decode", instance_id, 3, 12)
    assert parse_link(link + "x") is None
    assert parse_link("x" + link) is None


@pytest.mark.parametrize("fields", FIELD_SETS.values(), ids=FIELD_SETS)
def test_fields_can_be_series(fields: FieldSet) -> None:
    assert len(fields.index) == len(fields.fields)  # no key twice
    assert FIELD_SETS[fields.name] is fields
    shared = {f.name: (f.kind, f.help, f.label and f.label[0]) for f in fields.fields}
    for field in (f for other in FIELD_SETS.values() for f in other.fields):  # one family, one description
        assert shared.get(field.name, (field.kind, field.help, field.label and field.label[0])) == (
            field.kind,
            field.help,
            field.label and field.label[0],
        )


def test_the_schema_follows_the_fields() -> None:
    one = FieldSet("x", [Field("a", "counter", "A."), Field("b", "gauge", "B.", ("phase", "c"))])
    others = [
        FieldSet("x", one.fields[::-1]),
        FieldSet("x", [Field("a", "gauge", "A."), one.fields[1]]),
        FieldSet("x", [one.fields[0], Field("b", "gauge", "B.", ("phase", "d"))]),
    ]
    assert one.index == {"a": 0, "b.c": 1}
    assert one.schema == FieldSet("y", one.fields).schema
    assert one.schema not in {other.schema for other in others}


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram("x", (0.5, 2.0))
    for seconds in (0.1, 0.5, 0.500001, 2.0, 7.0):
        histogram.observe(seconds)
    assert histogram.values() == {"x.0.5": 2, "x.2.0": 2, "x.+Inf": 1, "x.sum": 10_100_001}
    assert [field.key for field in histogram.fields("X.")] == list(histogram.values())


# ------------------------------------------------------------------------------------------------ channel


def test_published_values_are_found_in_the_own_process(instance: str) -> None:
    channel = StatsChannel(OFFLOAD, instance, 1, 2)
    try:
        (empty,) = find_stats(os.getpid(), instance)
        assert set(empty.values.values()) == {0}
        channel.publish(OffloadStats(hits=3), kv_blocks=9)
        channel.publish({"misses": 1 << 62})
        (found,) = find_stats(os.getpid(), instance)
        assert (found.dp_rank, found.tp_rank, found.pid) == (1, 2, os.getpid())
        expected = dict.fromkeys(empty.values, 0) | {"hits": 3, "kv_blocks": 9, "misses": 1 << 62}
        assert found.values == expected
    finally:
        channel.close()
    channel.close()
    assert not find_stats(os.getpid(), instance)
    channel.publish({"hits": 4})  # after close: nothing, and no error
    assert not stats_files()


def test_a_dropped_channel_closes_its_file(instance: str) -> None:
    channel = StatsChannel(OFFLOAD, instance, 0, 0)
    assert len(stats_files()) == 1
    assert not os.get_inheritable(channel._fd)
    del channel
    assert not stats_files()


def test_wrong_names_and_values_leave_the_last_publication(instance: str) -> None:
    channel = StatsChannel(OFFLOAD, instance, 0, 0)
    channel.publish({"hits": 1, "misses": 2})
    with pytest.raises(KeyError, match="hit_ratio"):
        channel.publish({"hits": 9, "hit_ratio": 1})
    with pytest.raises(struct.error):
        channel.publish({"misses": 9, "hits": 0.5})  # type: ignore[dict-item]
    with pytest.raises(struct.error):
        channel.publish({"misses": 9, "hits": 1 << 63})
    channel.publish({"new_rows": 5})
    (found,) = find_stats(os.getpid(), instance)
    assert [found.values[name] for name in ("hits", "misses", "new_rows")] == [1, 2, 5]


def test_publish_is_cheap(instance: str) -> None:
    channel, stats = StatsChannel(OFFLOAD, instance, 0, 0), OffloadStats(hits=1)
    seconds = min(timeit.repeat(lambda: channel.publish(stats, live_rows=1), number=200, repeat=30)) / 200
    assert seconds < 20e-6  # 5 to 7 us on an idle machine; a factor of 3 for a busy one


def test_python_without_memfd_create_uses_libc(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    channel = StatsChannel(OFFLOAD, instance, 0, 0)
    assert channel.active
    assert not os.get_inheritable(channel._fd)
    channel.publish({"hits": 4})
    assert find_stats(os.getpid(), instance)[0].values["hits"] == 4


def test_no_memory_files_means_a_warning_and_no_metrics(
    instance: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    channel = StatsChannel(OFFLOAD, instance, 0, 0)
    assert not channel.active
    channel.publish({"hits": 4})
    channel.close()
    assert "too many open files" in caplog.text


# -------------------------------------------------------------------------------------------- two processes


def test_collector_shows_what_workers_publish(start: Callable[..., Writer], instance: str) -> None:
    writers = [start(instance, 0, 0), start(f"{instance}_dp0", 0, 1), start("other", 0, 0)]
    collector = OffloadCollector(StatsFinder(os.getpid(), instance, expected=2), "glm")
    samples = scrape(collector)
    assert samples["vllm:kvoffload_hits_total", "0"] == 90
    assert samples["vllm:kvoffload_hits_total", "1"] == 91
    assert samples["vllm:kvoffload_fetched_bytes_total", "1"] == 1 << 40
    assert samples["vllm:kvoffload_live_rows", "0"] == 2
    assert len(samples) == 2 * len(FIELDS)  # none of "other", and no series twice
    writers[0].send("channel.publish({'hits': 100}, live_rows=0)")
    samples = scrape(collector)
    assert samples["vllm:kvoffload_hits_total", "0"] == 100
    assert samples["vllm:kvoffload_live_rows", "0"] == 0
    assert find_stats(writers[1].process.pid)[0].tp_rank == 1  # a subtree of its own


def test_labels_are_those_of_vllm(start: Callable[..., Writer], instance: str) -> None:
    start(instance, 3, 1)
    registry = CollectorRegistry()
    registry.register(OffloadCollector(StatsFinder(os.getpid(), instance, expected=1), "glm"))
    text = generate_latest(registry).decode()
    assert 'vllm:kvoffload_misses_total{engine="3",model_name="glm",rank="1"} 10.0' in text
    assert "# TYPE vllm:kvoffload_misses_total counter" in text
    assert "# TYPE vllm:kvoffload_live_rows gauge" in text


def test_parts_of_a_worker_are_series_of_their_own(instance: str) -> None:
    offload, decode = (StatsChannel(fields, instance, 0, 0) for fields in (OFFLOAD, DECODE))
    other = StatsChannel(PREFILL, instance, 0, 1)
    seconds = receive_seconds()
    seconds.observe(0.2)
    seconds.observe(700.0)
    offload.publish({"hits": 4})
    decode.publish({"receives.reading": 2, "receives_failed.read": 3, **seconds.values()})
    other.publish({"open_transfers": 5, "transfers_closed.expired": 6, "peer_ranks": 7})
    collector = OffloadCollector(StatsFinder(os.getpid(), instance, expected=3), "glm")
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    text = generate_latest(registry).decode()
    assert 'vllm:kvoffload_hits_total{engine="0",model_name="glm",rank="0"} 4.0' in text
    assert 'vllm:kvoffload_receives{engine="0",model_name="glm",phase="reading",rank="0"} 2.0' in text
    assert 'receives_failed_total{engine="0",model_name="glm",rank="0",reason="read"} 3.0' in text
    for bound, count in (("0.1", 0), ("0.25", 1), ("600.0", 1), ("+Inf", 2)):
        assert (
            f'receive_seconds_bucket{{engine="0",le="{bound}",model_name="glm",rank="0"}} {count}.0' in text
        )
    assert 'receive_seconds_sum{engine="0",model_name="glm",rank="0"} 700.2' in text
    assert 'receive_seconds_count{engine="0",model_name="glm",rank="0"} 2.0' in text
    assert 'open_transfers{engine="0",model_name="glm",rank="1"} 5.0' in text
    assert 'transfers_closed_total{end="expired",engine="0",model_name="glm",rank="1"} 6.0' in text
    assert 'peer_ranks{engine="0",model_name="glm",rank="1"} 7.0' in text
    assert text.count("# TYPE vllm:kvoffload_peer_ranks gauge") == 1
    other.close()
    text = generate_latest(registry).decode()
    assert "open_transfers" not in text  # a decode engine has no series of prefill
    assert 'peer_ranks{engine="0",model_name="glm",rank="0"} 0.0' in text


def test_reads_under_hammering_are_never_torn(start: Callable[..., Writer], instance: str) -> None:
    start(instance, mode="hammer")
    finder = StatsFinder(os.getpid(), instance, expected=1)
    end, last, reads, changes = time.monotonic() + 3.0, 0, 0, 0
    while time.monotonic() < end and changes < 2000:
        (found,) = finder.read()
        if found.values["decode_steps"] == 5:  # the writer's first publication
            continue
        (step,) = set(found.values.values())  # all of one publication
        assert step >= last
        changes += step > last
        reads, last = reads + 1, step
    # Sharing one core, reader and writer alternate by time slices only.
    assert changes >= 10, f"{reads} reads saw only {changes} publications"


def test_a_killed_worker_is_dropped_and_its_successor_found(
    start: Callable[..., Writer], instance: str
) -> None:
    writer = start(instance)
    finder = StatsFinder(os.getpid(), instance, expected=1, rescan_s=0.0)
    collector = OffloadCollector(finder, "glm")
    assert scrape(collector)
    os.kill(writer.process.pid, signal.SIGKILL)
    # Until someone waits for it, it is a zombie: still a process, but one without files.
    os.waitid(os.P_PID, writer.process.pid, os.WEXITED | os.WNOWAIT)
    assert scrape(collector) == {}
    writer.kill()
    assert scrape(collector) == {}
    start(instance).send("channel.publish({'hits': 7})")
    assert scrape(collector)["vllm:kvoffload_hits_total", "0"] == 7


def test_a_stopped_worker_can_be_read(start: Callable[..., Writer], instance: str) -> None:
    writer = start(instance, mode="hammer")
    for _ in range(20):
        os.kill(writer.process.pid, signal.SIGSTOP)
        assert len(find_stats(os.getpid(), instance)) == 1
        os.kill(writer.process.pid, signal.SIGCONT)


def test_a_forked_child_neither_publishes_nor_outlives(start: Callable[..., Writer], instance: str) -> None:
    writer = start(instance, mode="fork")
    time.sleep(0.1)  # the child's own publish
    (found,) = find_stats(os.getpid(), instance)
    assert (found.pid, found.values["hits"]) == (writer.process.pid, 90)
    assert find_stats(writer.child, instance) == []


def test_no_file_is_inherited_over_exec(instance: str) -> None:
    channel = StatsChannel(OFFLOAD, instance, 0, 0)
    code = f"import os; print(os.path.exists('/proc/self/fd/{channel._fd}'))"
    assert subprocess.check_output([sys.executable, "-c", code], close_fds=False, text=True) == "False\n"


def test_searches_are_limited_and_only_while_workers_are_missing(
    start: Callable[..., Writer], instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    real = reader_module._search

    def counting(root: int, instance_id: str | None) -> Any:
        searches.append(root)
        return real(root, instance_id)

    monkeypatch.setattr(reader_module, "_search", counting)
    patient = StatsFinder(os.getpid(), instance, expected=1)
    assert [patient.read() for _ in range(5)] == [[]] * 5
    assert len(searches) == 1
    eager = StatsFinder(os.getpid(), instance, expected=1, rescan_s=0.0)
    assert (eager.read(), eager.read()) == ([], [])
    assert len(searches) == 3
    start(instance)
    assert all(len(eager.read()) == 1 for _ in range(5))
    assert len(searches) == 4


def test_a_descriptor_taken_over_by_another_file_is_not_opened(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    link = f"/memfd:{OFFLOAD.file_name('x', 0, 0)} (deleted)"
    try:
        assert reader_module._read(reader_module._Place(os.getpid(), str(fd), link)) is None
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------- collector


def test_failures_end_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finder = StatsFinder(os.getpid(), None, expected=1)
    monkeypatch.setattr(finder, "read", lambda: os.environ["NO_SUCH_KEY"])
    collector = OffloadCollector(finder, "glm")
    for _ in range(3):
        assert scrape(collector) == {}
    assert caplog.text.count("no metrics") == 1
    assert "KeyError" in caplog.text
    monkeypatch.setattr(collector_module, "WARN_EVERY_S", 0.0)
    collector._next_warning_s = 0.0
    scrape(collector)
    scrape(collector)
    assert caplog.text.count("no metrics") == 3


def worker(dp: int = 0, tp: int = 0, created_ns: int = 1, **values: int) -> WorkerStats:
    return part_of(OFFLOAD, values, dp, tp, created_ns)


def part_of(
    fields: FieldSet, values: dict[str, int], dp: int = 0, tp: int = 0, created_ns: int = 1
) -> WorkerStats:
    assert set(values) <= set(fields.index)
    return WorkerStats(fields.name, "i", dp, tp, 1, created_ns, {**dict.fromkeys(fields.index, 0), **values})


def test_report_shows_the_interval_not_the_totals() -> None:
    report = IntervalReport(0.0)
    first = worker(hits=50, misses=50, fetched_bytes=20_000_000, live_rows=3)
    (line,) = report.lines([first], 10.0)
    assert line.startswith("Engine 000: KV offload: hit ratio 50.0%, fetched 2.0 MB/s")
    assert report.lines([first], 20.0) == []
    (line,) = report.lines([worker(hits=140, misses=60, fetched_bytes=21_000_000, live_rows=1)], 22.0)
    assert "hit ratio 90.0%, fetched 0.5 MB/s" in line
    assert "1 requests" in line


def test_report_sums_ranks_and_separates_engines() -> None:
    ranks = [worker(tp=tp, hits=1, written_bytes=10_000_000) for tp in range(2)]
    lines = IntervalReport(0.0).lines([*ranks, worker(dp=1, prefill_bytes=5_000_000), worker(dp=2)], 1.0)
    assert len(lines) == 2
    assert "written 20.0 MB/s" in lines[0]
    assert lines[1].startswith("Engine 001: KV offload: no row looked up, fetched 0.0 MB/s, streamed 5.0")


def test_report_takes_a_new_worker_from_nothing() -> None:
    report = IntervalReport(0.0)
    report.lines([worker(hits=1000)], 1.0)
    assert "hit ratio 25.0%" in report.lines([worker(created_ns=2, hits=1, misses=3)], 2.0)[0]


def test_report_has_a_line_for_each_side_of_transfers() -> None:
    report = IntervalReport(0.0)
    prefill = {"transfers_opened": 9, "transfers_closed.finished": 4, "transfers_closed.expired": 2}
    decode = {"receives_done": 3, "receives_failed.read": 1, "pulled_bytes": 8_000_000, "receives.waiting": 2}
    workers = [
        part_of(PREFILL, {**prefill, "open_transfers": 3}),
        part_of(DECODE, decode, dp=1, tp=0),
        part_of(DECODE, {**decode, "receives_done": 2, "receives.reading": 1}, dp=1, tp=1),
    ]
    assert report.lines(workers, 2.0) == [
        "Engine 000: KV transfers to decode: 4 finished, 2 expired; 3 open, 0 kept",
        # Ranks share the requests, not the bytes.
        "Engine 001: KV transfers from prefill: 3 requests received, 1 failed (read); 3 to come, 8.0 MB/s",
    ]
    assert report.lines(workers, 3.0) == []


def test_a_worker_whose_counters_cannot_be_written_goes_on_without(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = StatsChannel(OFFLOAD, instance, 0, 0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    channel.publish({"hits": 1})
    assert not channel.active
    channel.publish({"hits": 2})
