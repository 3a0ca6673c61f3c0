"""The key of the control plane: made once, read only where its owner alone can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_kvoffload.cli.main import app
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.remote_d2h import parse_remote_d2h, read_control_key


def make(path: Path) -> int:
    return CliRunner().invoke(app, ["control-key", str(path)]).exit_code


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_a_key_is_made_for_its_owner_and_never_replaced(tmp_path: Path, umask: int) -> None:
    path, before = tmp_path / "key", os.umask(umask)
    try:
        assert make(path) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    extra = {"transfer_backend": "nixl", "control_key_file": str(path)}
    config = parse_remote_d2h("kv_producer", 1, extra, "cpu")
    assert config.control_key == text.strip()
    assert text.strip() not in repr(config)
    assert make(path) == make(tmp_path / "no" / "key") == 2
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "mode", "rule"),
    [
        ("a" * 64, 0o640, "others may read or change it (mode 0640)"),
        ("a" * 64, 0o602, "others may read"),
        ("a" * 63, 0o600, "must hold 64 hex characters"),
        ("a" * 65, 0o600, "must hold 64 hex"),
        ("g" * 64, 0o600, "must hold 64 hex"),
        ("\u0661" * 64, 0o600, "must hold 64 hex"),
        (f"{'a' * 64}\n{'b' * 64}\n", 0o600, "must hold 64 hex"),
        ("", 0o600, "must hold 64 hex"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, text: str, mode: int, rule: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(ConfigError) as error:
        read_control_key(str(path))
    assert rule in str(error.value)
    assert "a" * 30 not in str(error.value)


def test_what_is_no_file_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "a\0b", "", 5, ["a"]):
        with pytest.raises(ConfigError, match="control_key_file"):
            read_control_key(str(path) if isinstance(path, Path) else path)
    assert read_control_key(None) is None
