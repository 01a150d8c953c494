"""What every section of a scenario shares: strict frozen models, and errors between fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ddpsim.errors import shown

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

MOST_RANKS = 2_000_000
Fraction = Annotated[float, Field(ge=0.001, le=1)]
Sigma = Annotated[float, Field(ge=0, le=1)]


def numbered(key: Any) -> Any:
    """A key that is a number's digits as that number: JSON and `--set` write no other."""
    is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
    return int(key) if is_digits else key


Number = Annotated[int, BeforeValidator(numbered)]  # of a rank or a node, as a key


class Spec(BaseModel):
    """Frozen, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, serialize_by_alias=True
    )

    def having(self, at: str = "", /, **values: Any) -> Self:
        """Copy with other values in the section at a dotted path of attributes, or in this one.

        Whether they fit is not checked again.
        """
        if not at:
            return self.model_copy(update=values)
        section, _, inner = at.partition(".")
        changed = getattr(self, section).having(inner, **values)
        return self.model_copy(update={section: changed})


def given(value: Any) -> Any:
    """A key with nothing under it is an empty section: its defaults."""
    return {} if value is None else value


def named(value: Any) -> Any:
    """A word is a section with that name, and nothing under a key an empty section."""
    return {"name": value} if isinstance(value, str) else given(value)


def switched(value: Any) -> Any:
    """True is a section with its defaults, and false none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def fail(message: str, at: str = "") -> PydanticCustomError:
    """A cross-field error, shown at the key `at` of the model that raises it."""
    return PydanticCustomError("scenario", "{message}", {"message": message, "at": at})


def refuse(at: str, reasons: Mapping[str, object]) -> None:
    """Raise `fail` at a key for the first of the reasons that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise fail(reason, at)


def first_rank(node: int, usual: int, smaller: Sequence[tuple[int, int]]) -> int:
    """A node's first rank, where ranks are numbered node by node; behind the last node: all ranks.

    `usual`: ranks of a node; `smaller`: nodes with fewer, and their ranks.
    """
    if not smaller:
        return node * usual
    return node * usual - sum(usual - size for other, size in smaller if other < node)


def ranks_by_node(nodes: int, usual: int, smaller: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Ranks of each node, see `first_rank`."""
    sizes = dict(smaller)
    return tuple(sizes.get(node, usual) for node in range(nodes))


def word_or_modules(value: Any, words: Sequence[str], choice: str) -> Any:
    """One of some words, or names of modules, each once; raises ValueError."""
    if isinstance(value, str) and value in words:
        return value
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"{shown(value)} is no choice of {choice}; write {' or '.join(words)}, or a list of "
            'modules\' names in quotes, such as ["layers.0", "layers.1"]'
        )
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"{shown(twice[0])} is listed twice; name each module once")
    return tuple(names)
