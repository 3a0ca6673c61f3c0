"""One validator for each kind of value. All raise ConfigError: key, value, rule and fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vllm_kvoffload.settings.errors import ConfigError

GIB = 1 << 30


def check_bool(key: str, value: object) -> bool:
    """The value, if it is a bool."""
    # A quoted "false" is truthy in Python: accepting it would switch the option on.
    if not isinstance(value, bool):
        raise ConfigError(
            key, value, f"must be true or false, not a {type(value).__name__}", "write true or false"
        )
    return value


def check_int(key: str, value: object, low: int, high: int | None = None) -> int:
    """The value, if it is an integer in the range, both ends included."""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        fix = f"write a whole number without quotes, {bounds}"
        raise ConfigError(key, value, f"must be an integer, not a {type(value).__name__}", fix)
    if value < low or (high is not None and value > high):
        nearest = low if high is None or value < low else high
        raise ConfigError(key, value, f"must be {bounds}", f"set it to {nearest}")
    return value


def check_number(
    key: str, value: object, what: str, *, low: float, high: float, fix: str, open_low: bool = False
) -> float:
    """The value, if it is a finite number in the range. what: the rule; open_low: without low itself."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and math.isfinite(value) and low <= value <= high and not (open_low and value == low):  # type: ignore[arg-type, operator]
        return float(value)  # type: ignore[arg-type]
    raise ConfigError(key, value, what, fix)


def check_text(key: str, value: object) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise ConfigError(key, value, "must be a string", "write it in quotes")
    return value


def check_one_of(key: str, value: object, choices: Sequence[str], default: str) -> str:
    """The value, if it is one of the choices; the fix names the nearest one."""
    if not isinstance(value, str) or value not in choices:
        close = difflib.get_close_matches(str(value).lower(), choices, n=1) or [default]
        raise ConfigError(key, value, f"must be one of {', '.join(choices)}", f'set it to "{close[0]}"')
    return value


def check_new_path(key: str, value: object) -> str:
    """The value, if it is "" or a path in a directory that exists."""
    if not isinstance(value, str):
        raise ConfigError(key, value, "must be a string", 'write a path in quotes, or "" for none')
    if value and not Path(value).absolute().parent.is_dir():
        raise ConfigError(key, value, "its directory does not exist", f"create {Path(value).parent}")
    return value


def refuse_unknown_keys(
    section: str,
    given: Mapping[str, object],
    known: Iterable[str],
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raises ConfigError for the first key that isn't known.

    Args:
        section: prefix of a key in messages. elsewhere: keys that other programs define in the same section,
            each with the reason why it has no effect here.
    """
    keys = tuple(known)
    lower = {key.lower(): key for key in keys}
    for key, value in given.items():
        if key in keys:
            continue
        name = f"{section}.{key}"
        if elsewhere and key in elsewhere:
            raise ConfigError(name, value, elsewhere[key], "remove it")
        close = difflib.get_close_matches(str(key).lower(), lower, n=1)
        if close:
            match = lower[close[0]]
            raise ConfigError(name, value, f"no such key; did you mean {match!r}?", f"rename it to {match!r}")
        raise ConfigError(name, value, "no such key", f"remove it; the keys are {', '.join(keys)}")
