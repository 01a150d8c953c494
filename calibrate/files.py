"""Our files: read with one clear error, written whole, never over what is not to be lost."""

from __future__ import annotations

import codecs
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationInfo

from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.files import open_regular, read_regular, write_atomically
from ddpsim.importers.text import parsed

HTML = "HTML"
_LARGEST_BYTES = 2**28
_BEGIN = 4096  # bytes that tell what a file holds

_Model = TypeVar("_Model", bound=BaseModel)


class Part(BaseModel):
    """A file of ours, or a part of it: unknown keys are errors, and so are infinities."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )


def _file_name(given: object, info: ValidationInfo) -> Path:
    if isinstance(given, Path):
        return given
    if info.mode == "json" and isinstance(given, str):
        return Path(os.fsdecode(unquote_to_bytes(given)))
    raise ValueError("wanted the name of a file")


# JSON holds no other text than Unicode's, but a file's name may be any bytes: %e9
FileName = Annotated[
    Path,
    PlainValidator(_file_name),
    PlainSerializer(lambda path: quote_from_bytes(os.fsencode(path)), str, when_used="json"),
]


def name_as_text(path: Path) -> str:
    """A file's name without its folder, as text that a file can hold: other bytes are escaped."""
    return os.fsencode(path.name).decode("utf-8", errors="backslashreplace")


def load_json(model: type[_Model], path: Path, wanted: str) -> _Model:
    """A file as one of our models, called `wanted`; raises ImportFailedError with what is wrong."""
    try:
        text = read_regular(path, _LARGEST_BYTES)
    except OSError as error:
        raise ImportFailedError(str(path), f"cannot be read: {error.strerror}") from None
    return parsed(model, str(path), text.removeprefix(codecs.BOM_UTF8), wanted)


def save_json(model: BaseModel, path: Path, indent: int | None = 1) -> None:
    """Write one of our models whole, or leave the old file as it was; raises OSError."""
    write_atomically(path, model.model_dump_json(by_alias=True, indent=indent) + "\n")


def check_outputs(outputs: Sequence[tuple[Path, str]], inputs: Iterable[Path] = ()) -> None:
    """Before any work: raise DdpsimError where writing the outputs would destroy something.

    Each comes with what it will hold: a schema, or HTML. None may be an input or another output,
    and what is there already must be of the same kind.
    """
    read = {path.resolve() for path in inputs}
    for (one, _), (other, _) in combinations(outputs, 2):
        if one.resolve() == other.resolve():
            raise DdpsimError(f"{one} cannot hold two outputs: name another file for one of them")
    for path, kind in outputs:
        if path.resolve() in read:
            raise DdpsimError(f"{path} is read, and would be written over: name another output")
        if path.is_dir():
            raise DdpsimError(f"{path} is a folder: name a file in it")
        if path.is_file() and not _is_of_kind(path, kind):
            raise DdpsimError(
                f"{path} is there already, and not of the kind to be written ({kind}): name "
                "another file, or remove it"
            )


def check_writable(path: Path) -> None:
    """Before an hour's work, not after it: raise DdpsimError where a file cannot be written."""
    if path.exists() and not path.is_file():  # /dev/stdout
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise DdpsimError(f"{path} cannot be written: {error.strerror}") from None


def rescued(name: str, text: str) -> str:
    """What could not be written, where temporary files go; and what became of it, in words."""
    try:
        path = Path(tempfile.mkdtemp(prefix="ddpsim-")) / name
        write_atomically(path, text)
    except OSError as error:
        return f"Nor can it be kept elsewhere ({error.strerror}): make room and measure again"
    return f"It is whole in {path}: move it from there"


def _is_of_kind(path: Path, kind: str) -> bool:
    """Whether a file is empty or holds that kind; what cannot be read is not ours to replace."""
    try:
        with open_regular(path) as file:
            begin = file.read(_BEGIN).decode("utf-8-sig", errors="replace").strip()
    except OSError:
        return False
    if kind == HTML:
        return not begin or begin.startswith("<")
    family = re.escape(kind.rpartition("/")[0])
    return not begin or re.search(rf'"schema"\s*:\s*"{family}/', begin) is not None
