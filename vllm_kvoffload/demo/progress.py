"""The demo's stages on screen: live lines with elapsed time in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HEARTBEAT_S = 15.0
"""Longest time without a line if there is no terminal."""

Note = Callable[[str], None]
"""Reports a stage's progress; cheap, callable from any thread."""


class Stages:
    """A context manager that shows stages while it is open. All lines go to `console`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start_s = time.monotonic()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def pause(self) -> None:
        """Ends the live display so that other output can follow; later stages restart it."""
        self._progress.stop()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

    @contextmanager
    def stage(self, title: str) -> Iterator[Note]:
        """Shows a stage for the duration of the context; its last note remains on the line."""
        self._progress.start()
        task = self._progress.add_task(title, total=1, note="")
        start_s = said_s = time.monotonic()
        last = ""
        self._line(f"{title} ...")

        def note(text: str) -> None:
            nonlocal said_s, last
            last = text
            self._progress.update(task, note=text)
            if time.monotonic() - said_s >= HEARTBEAT_S:
                said_s = time.monotonic()
                self._line(f"{title}: {text or 'still at it'}")

        try:
            yield note
        except BaseException:
            self._progress.stop_task(task)
            self._line(f"{title}: failed after {time.monotonic() - start_s:.1f} s")
            raise
        self._progress.update(task, completed=1)
        self._line(f"{title}: done in {time.monotonic() - start_s:.1f} s{last and f', {last}'}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            elapsed_s = time.monotonic() - self._start_s
            self.console.print(f"[{elapsed_s:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)
