"""The error raised for an invalid setting."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """An invalid setting. `str()` is one line: the key, its value, the broken rule and the fix.

    Attributes: key (as the user spells it), value, rule, fix.
    """

    def __init__(self, key: str, value: object, rule: str, fix: str) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        stop = "" if rule.endswith("?") else "."
        super().__init__(" ".join(f"{key}={shown}: {rule}{stop} Fix: {fix}".split()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers send errors pickled; the default would call __init__ with the message alone.
        return type(self), (self.key, self.value, self.rule, self.fix)
