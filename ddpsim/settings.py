"""Settings as `--set` takes them: a dotted key, and one value or several."""

from __future__ import annotations

from typing import NamedTuple

_OPENING, _CLOSING = "[{(", "]})"


class Setting(NamedTuple):
    """A dotted key and its value, as `--set` takes them."""

    key: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`key.path=value`; raises ValueError without a key or an equals sign."""
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{text!r} is no setting; write key.path=value")
        return cls(key.strip(), value)

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def setting(key: str, value: object) -> str:
    """`key=value`, where YAML writes true, false and null for Python's own."""
    is_word = value is None or isinstance(value, bool)
    return f"{key}={'null' if value is None else str(value).lower() if is_word else value}"


def split_values(text: str) -> list[str]:
    """Values between commas, those inside brackets and quotes apart; without spaces around."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "," and not depth:
            parts.append("")
            continue
        depth += (sign in _OPENING) - (sign in _CLOSING) if not quote else 0
        parts[-1] += sign
    return [part.strip() for part in parts]
