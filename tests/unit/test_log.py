"""Log lines that repeat, or that quote what came from outside."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_kvoffload.foreign_text import is_line, printable, shown
from vllm_kvoffload.log import KINDS_KEPT, RateLimitedLog


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("vllm.quiet-test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.DEBUG)  # whatever vLLM's loggers were set to in this process
    return lines


def test_a_kind_is_logged_once_a_period(said: list[str]) -> None:
    now = 0.0
    quiet = RateLimitedLog("quiet-test", lambda: now, subject="store", period_s=10.0)
    for number in range(5):
        quiet.warning("lookup", f"no {number}")
    quiet.warning("close", "other kinds have their own turn")
    now = 10.0
    quiet.warning("lookup", "no 5")
    assert said == [
        "store lookup: no 0",
        "store close: other kinds have their own turn",
        "store lookup: no 5 (4 more since the last message)",
    ]


def test_strangers_can_not_make_kinds_without_end(said: list[str]) -> None:
    quiet = RateLimitedLog("quiet-test", lambda: 0.0)
    for number in range(3 * KINDS_KEPT):
        quiet.error(f"kind {number}", "text")
    assert len(said) == KINDS_KEPT + 1


def test_lines_left_out_of_old_kinds_are_forgotten(said: list[str]) -> None:
    """Kinds may hold what a request says, such as a host; each named twice must not be kept for ever."""
    now = 0.0
    quiet = RateLimitedLog("quiet-test", lambda: now, period_s=10.0)
    for number in range(8 * KINDS_KEPT):
        now += 0.1
        quiet.error(f"kind {number}", "text")
        quiet.error(f"kind {number}", "text")
    assert len(said) == 8 * KINDS_KEPT
    assert max(len(quiet._next), len(quiet._dropped)) <= KINDS_KEPT + 1


def test_threads_may_log_at_the_same_time(said: list[str]) -> None:
    quiet = RateLimitedLog("quiet-test", lambda: 0.0)

    def log(thread: int) -> None:
        for number in range(2000):
            quiet.error(f"kind {thread} {number}", "text")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(log, range(4)))  # raises what a thread raised
    assert len(said) >= KINDS_KEPT


def test_foreign_text_is_one_short_line() -> None:
    assert printable("a\r\nb\x1b\u2028\ud800") == "a\\x0d\\x0ab\\x1b\\x2028\\xd800"
    assert printable("c" * 900, 500) == "c" * 497 + "..."
    assert len(printable("\n" * 500)) == 512
    assert is_line(printable("\x7f\x85"))
    assert shown("a\n" * 100) == ascii("a\n" * 40) + "... (200 characters)"
    assert [shown(value) for value in (None, 1.5, 1 << 200, {}, [], b"")] == [
        "None", "1.5", "an integer of 201 bits", "an object", "a list", "a bytes",
    ]  # fmt: skip
