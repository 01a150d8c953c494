"""What a refusal says: our own words for what is wrong, and the known name that was meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ddpsim.errors import shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from ruamel.yaml.error import MarkedYAMLError

_LONGEST = 100  # comparing longer text takes seconds
_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text, in quotes",
    "dict": "keys and values",
    "model": "keys and values",
    "too": "at least one entry",
    "list": "a list",
    "tuple": "a list",
}


# what other programs call values of ours, squashed
_OTHER_NAMES = {
    **dict.fromkeys(("16", "16mixed", "fp16", "float16", "half", "amp"), "amp-fp16"),
    **dict.fromkeys(("bf16mixed", "mixedbf16"), "amp-bf16"),  # Lightning's; its bf16-true is bf16
    **dict.fromkeys(("bf16true", "bfloat16"), "bf16"),
    **dict.fromkeys(("32", "32true", "float32"), "fp32"),
    **dict.fromkeys(("ib", "infiniband", "roce"), "rdma"),
    **dict.fromkeys(("ethernet", "socket"), "tcp"),
}


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """`" Did you mean 'latency'?"`, or an empty string when nothing known is near."""
    near = nearest(wrong, names)
    return "" if near is None else f" Did you mean {near!r}?"


def most_like(wrong: str, spellings: Mapping[str, str], count: int = 3) -> list[str]:
    """The known names that a misspelt one is most like, by all of their spellings, best first."""
    near = _like(wrong[:_LONGEST].lower(), spellings, n=len(spellings), cutoff=0)
    return list(dict.fromkeys(spellings[spelling] for spelling in near))[:count]


def _like(wrong: str, names: Iterable[str], *, n: int, cutoff: float) -> list[str]:
    from difflib import get_close_matches  # noqa: PLC0415 -- few scenarios have a mistake

    return get_close_matches(wrong, list(names), n=n, cutoff=cutoff)


def nearest(wrong: str, names: Iterable[str]) -> str | None:
    """The known name that a misspelt one stands for, if one is near."""
    by_key = {squashed(name): name for name in names}
    key = squashed(wrong[:_LONGEST])
    if key in by_key:
        return by_key[key]
    within = [name for name in by_key if len(key) > 3 and name.startswith(key)]
    within = within or [name for name in by_key if len(key) > 3 and key in name]
    near = within if len(within) == 1 else _like(key, by_key, n=1, cutoff=0.6) or within
    return by_key[min(near, key=len)] if near else None


def squashed(name: str) -> str:
    """A name in small letters alone."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def in_own_words(details: ErrorDetails) -> str:
    """What is wrong, for each kind of pydantic error: its own words are for programmers."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    messages = {
        "extra_forbidden": "unknown key",
        "missing": "is missing",
        "json_invalid": f"is no JSON: {context.get('error')}",
        "scenario": str(context.get("message")),
        "value_error": str(context.get("error")),
    }
    if kind in messages:
        return messages[kind]
    got = shown(value)
    if kind == "literal_error":
        wanted = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        meant = _OTHER_NAMES.get(squashed(str(value)), "")
        meant = meant if meant in wanted else str(value)
        hint = did_you_mean(meant, wanted) if len(wanted) > 1 else ""
        wrong = "nothing is given" if value is None else f"{got} is unknown"
        return f"{wrong}.{hint} Wanted: {', '.join(wanted)}"
    if kind in _LIMITS:
        bound, words = _LIMITS[kind]
        return f"{got} is out of range: wanted {words} {context[bound]:.15g}"
    quoted = (
        kind in ("int_type", "float_type")
        and isinstance(value, str)
        and value.replace(".", "", 1).isdecimal()
    )
    type_ = _KINDS.get(kind.split("_", maxsplit=1)[0], "another value")
    return f"wanted {type_}, got {got}{': drop the quotes' if quoted else ''}"


_YAML_HINTS = {
    "mapping values are not allowed": "look for uneven indentation or a colon without a space",
    "expected ',' or": "a bracket is not closed",
    "expected <block end>": "keys of one level start in the same column",
    "\\t": "indent with spaces, not tabs",
    "expected a single document": "keep one scenario a file",
    "unexpected end of stream": "a quote is not closed",
}


def why_no_yaml(error: MarkedYAMLError) -> str:
    """What the parser says, on one line, with where the thing began and what it often means."""
    problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    began, ended = error.context_mark, error.problem_mark
    since = f" (it began in line {began.line + 1})" if began and ended.line > began.line else ""
    hint = next((f"; {hint}" for words, hint in _YAML_HINTS.items() if words in problem), "")
    return f"{problem}{since}{hint}"
