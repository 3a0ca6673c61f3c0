"""Runs pip in an environment and explains a failure in one sentence. Standard library only.

pip's own configuration (indexes, mirrors, wheel folders) is respected.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# PyTorch's public index of CPU builds: used only if pip's own configuration has none.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Settings that would send packages elsewhere than into the environment, or modules of elsewhere into it.
FOREIGN_SETTINGS = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
    "PYTHONPATH",
)

_NETWORK = re.compile(
    r"Failed to establish a new connection|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|Connection (?:refused|reset|aborted)|Connect\w*Error|ProxyError"
    r"|[Rr]ead timed out|ConnectTimeout|SSLError|CERTIFICATE_VERIFY_FAILED"
)
_DIAGNOSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"No space left on device|Disk quota exceeded"), "the disk is full: about 5 GB are needed"),
    (
        _NETWORK,
        "no network, or the package index can't be reached: pip's settings are shown by `pip config list`",
    ),
    (
        re.compile(r"ResolutionImpossible|conflicting dependencies"),
        "requirements contradict each other: scripts/constraints-cpu.txt, pip's own constraints "
        "(`pip config list`) and PIP_CONSTRAINT must agree",
    ),
    (re.compile(r"CMake Error|CMake build failed|ninja: build stopped"), "our C++ operators don't build"),
    (re.compile(r"(No matching distribution found for [^\n]+)"), "the package index doesn't have it"),
    (re.compile(r"Permission denied|Read-only file system"), "no permission to write"),
)


@dataclass(frozen=True)
class PipResult:
    """Result of a pip command: exit status (0: success) and its complete output."""

    status: int
    output: str = field(repr=False)

    @property
    def lacks_distribution(self) -> bool:
        """The index answered, but lacks the requested version.

        When that version is in the constraints too, pip calls it a conflict between the two.
        """
        said = "No matching distribution found" in self.output or "ResolutionImpossible" in self.output
        return said and not _NETWORK.search(self.output)


class SetupFailed(Exception):
    """The set-up cannot continue; the message gives the finding and the remedy."""


def diagnose(output: str) -> str:
    """Derives one sentence about a failure's cause from pip's output."""
    for pattern, sentence in _DIAGNOSES:
        found = pattern.search(output)
        if found:
            return f"{found.group(1)}: {sentence}" if found.groups() else sentence
    return "pip failed"


def clean_environ() -> dict[str, str]:
    """The process environment without settings that would redirect pip."""
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN_SETTINGS}
    environ.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    return environ


class Pip:
    """pip of one environment. Output goes to `log`; the terminal sees one line a step."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python = python
        self.log = log

    def run(self, *arguments: str, title: str) -> PipResult:
        """Runs one pip command. Never raises for a failed command: see `PipResult.status`."""
        command = [str(self.python), "-Iu", "-m", "pip", *arguments]
        environ = clean_environ()
        # The environment's own cmake and ninja first, as an activated environment has them.
        environ["PATH"] = f"{self.python.parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        lines: list[str] = []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        progress = _Progress(title)
        with self.log.open("a", buffering=1) as log:
            log.write(f"\n$ {' '.join(command)}\n")
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environ,
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    log.write(line)
                    progress.show(line)
        progress.done(process.returncode)
        return PipResult(process.returncode, "".join(lines))

    def must(self, *arguments: str, title: str) -> PipResult:
        """`run`, or raise `SetupFailed` with a diagnosis and the end of pip's output."""
        result = self.run(*arguments, title=title)
        if result.status:
            raise failure(title, result, self.log)
        return result


def failure(title: str, result: PipResult, log: Path) -> SetupFailed:
    """The error for a failed step."""
    tail = "".join(f"    {line}\n" for line in result.output.strip().splitlines()[-12:])
    return SetupFailed(f"{title}: {diagnose(result.output)}\n{tail}  whole log: {log}")


class _Progress:
    """Prints one line per step; on a terminal also pip's current activity, since a step can take minutes."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.clear = "\r\x1b[K" if sys.stdout.isatty() else ""
        self.started = time.monotonic()
        print(f"  ...      {title}", end="" if self.clear else "\n", flush=True)

    def show(self, line: str) -> None:
        """Shows the subject of a line of pip's output, on a terminal only."""
        word = line.strip().split("(")[0][:60]
        if self.clear and word.startswith(
            ("Collecting", "Downloading", "Installing", "Building", "Preparing")
        ):
            print(f"{self.clear}  ...      {self.title}: {word}", end="", flush=True)

    def done(self, status: int) -> None:
        """Ends the step's line."""
        seconds = time.monotonic() - self.started
        mark = "done" if status == 0 else "failed"
        print(f"{self.clear}  {mark:8} {self.title} ({seconds:.0f} s)", flush=True)


def install_torch(pip: Pip, requirement: str, constraints: Path) -> None:
    """Install a CPU torch; `requirement` names its +cpu build: no multi-gigabyte CUDA build can match.

    Plain pip first: many machines have the build in a mirror or a wheel folder. Only when the index answers
    that it has none is PyTorch's own CPU index asked as well.
    Raises SetupFailed when neither has it.
    """
    arguments = ("install", "-c", str(constraints), requirement)
    title = f"{requirement} (0.2 GB)"
    result = pip.run(*arguments, title=title)
    if result.status and result.lacks_distribution:
        title = f"{requirement} from PyTorch's CPU index"
        result = pip.run(*arguments, "--extra-index-url", TORCH_CPU_INDEX, title=title)
        if result.status:
            hint = (
                f"  {requirement} is neither on pip's index nor to be had from {TORCH_CPU_INDEX}.\n"
                "  Offline, or behind a mirror: put its wheel for this Python into a folder, then "
                "PIP_FIND_LINKS=FOLDER make setup"
            )
            raise SetupFailed(f"{failure(title, result, pip.log)}\n{hint}")
    if result.status:
        raise failure(title, result, pip.log)
