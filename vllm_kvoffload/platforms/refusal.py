"""Ends a start-up with one clear line instead of a traceback."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import NoReturn

from vllm_kvoffload.settings.errors import ConfigError


class StartupRefusedError(RuntimeError):
    """The engine was not started; the message is the :class:`ConfigError`'s line.

    Not a ValueError: pydantic, which runs vLLM's configuration checks, would wrap it into several lines.
    """


def refuse(error: ConfigError) -> NoReturn:
    """Raises :class:`StartupRefusedError`; uncaught, it ends the process with that line and exit code 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if isinstance(value, StartupRefusedError):
            print(f"vllm-kvoffload: {value}", file=sys.stderr)
        else:
            previous(kind, value, trace)

    sys.excepthook = hook
    raise StartupRefusedError(str(error)) from None
