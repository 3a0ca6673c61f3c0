"""Runs a command and sees to it that it leaves no process and no shared memory behind. Standard library only.

    python3 scripts/guarded.py make test

Leftovers are named, ended and removed, and turn success into failure: a test that leaves an engine running is
broken. A process counts as the command's when its environment carries this run's mark, whatever process group
it has moved to, so that nothing of anybody else can be hit. A shared memory file counts when it appeared
meanwhile, is ours, and no process has it open; it is a failure only when it is this project's, as others on
the machine make some too.
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
GRACE_S = 5.0  # resource trackers and servers that were told to stop need a moment


def marked_processes(mark: bytes) -> dict[int, str]:
    """Command lines, by process id, of the living processes that carry the mark; never this one."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found


def wait_until_gone(mark: bytes, seconds: float) -> dict[int, str]:
    """The marked processes that are still there after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = marked_processes(mark)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def end(mark: bytes) -> None:
    """End all marked processes: politely, then by force, also those that they start meanwhile."""
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
    """Those of the shared memory files that some process has open or mapped."""
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
    """Remove the files that appeared since `before` and that nobody uses; their names."""
    new = shared_files() - before
    left = sorted(new - in_use(new))
    for name in left:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return left


def run(command: list[str]) -> int:
    """Run the command; its exit status, 1 for a success that left something behind, 128+n for a signal."""
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
