"""Runs a command and ensures that it leaves no process and no shared memory behind. Standard library only.

    python3 scripts/guarded.py make test

Leftovers are listed, ended and removed, and turn success into failure: a test that leaves an engine
running is broken. A process belongs to the command if its environment carries this run's mark, in any
process group, so that no unrelated process is hit. A shared memory file belongs to it if it appeared
during the run, is this user's, and no process has it open; it counts as a failure only if it is this
project's, since other programs create some too.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "KVOFFLOAD_GUARD"
OUR_PREFIX = "kvoffload"
SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 5.0  # seconds that resource trackers and stopped servers need to exit


def marked_processes(mark: bytes) -> dict[int, str]:
    """Returns the command lines, by process id, of live processes that carry the mark, except this one."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def wait_until_gone(mark: bytes, seconds: float) -> dict[int, str]:
    """Waits at most `seconds`; returns the marked processes still running."""
    deadline = time.monotonic() + seconds
    while True:
        left = marked_processes(mark)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def end(mark: bytes) -> None:
    """Ends all marked processes, including those they start meanwhile: SIGTERM first, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0), (signal.SIGKILL, 1.0)):
        for pid in marked_processes(mark):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if not wait_until_gone(mark, seconds):
            return


def shared_files() -> set[str]:
    """Names of this user's files in shared memory."""
    names = set()
    for entry in os.scandir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        try:
            if (
                entry.is_file(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            ):
                names.add(entry.name)
        except FileNotFoundError:
            continue
    return names


def in_use(names: set[str]) -> set[str]:
    """Returns the shared memory files that some process has open or mapped."""
    used: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "maps").read_text(errors="replace")
            text += "".join(f"{os.readlink(link)}\n" for link in (folder / "fd").iterdir())
        except OSError:
            continue
        used |= {name for name in names if f"{SHARED_MEMORY}/{name}\n" in text}
    return used


def remove_shared(before: set[str]) -> list[str]:
    """Removes unused files that appeared since `before`; returns their names."""
    new = shared_files() - before
    left = sorted(new - in_use(new))
    for name in left:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return left


def run(command: list[str]) -> int:
    """Runs the command; returns its exit status, 1 if a success left something behind, 128+n for a signal."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    needle = f"{MARK}={mark}".encode()
    before = shared_files()
    with subprocess.Popen(command, env={**os.environ, MARK: mark}) as process:
        stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = [signal.signal(stop, lambda number, _: process.send_signal(number)) for stop in stops]
        status = process.wait()
    for stop, handler in zip(stops, handlers, strict=True):
        signal.signal(stop, handler)
    left = wait_until_gone(needle, GRACE_S)
    for pid, text in left.items():
        print(f"left behind: process {pid}: {text[:200]}", file=sys.stderr, flush=True)
    end(needle)
    files = remove_shared(before)
    for name in files:
        print(f"left behind: {SHARED_MEMORY}/{name}", file=sys.stderr, flush=True)
    if status < 0:
        return 128 - status
    return status or int(bool(left) or any(name.startswith(OUR_PREFIX) for name in files))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1:]))
