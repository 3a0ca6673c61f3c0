"""`kvoffload control-key`: creates the key that encrypts control messages between prefill and decode."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("control-key")(control_key)


def control_key(
    file: Annotated[Path, typer.Argument(help="New file for the key; one that is there is left alone.")],
) -> None:
    """Make a key for control_key_file: copy the file to each machine, and keep it from others."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as opened:
            os.fchmod(opened.fileno(), 0o600)  # regardless of the umask
            opened.write(f"{secrets.token_hex(32)}\n")
    except OSError as error:
        typer.echo(f"kvoffload control-key: {file} can't be made: {error.strerror}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"A new key is in {file}, readable by you alone")
