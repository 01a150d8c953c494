"""docs/architecture.md names the rooms that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def packages() -> list[Path]:
    """The folders of modules that are installed."""
    installed = (ROOT / "ddpsim", ROOT / "calibrate")
    return sorted({path.parent for root in installed for path in root.rglob("*.py")})


def column(heading: str, number: int) -> Iterator[str]:
    """The code spans in a column, from 0, of the table below a heading of the map."""
    section = MAP.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"no table below {heading!r}"
    for row in rows[2:]:
        yield from re.findall(r"`([^`]+)`", row.strip("|").split("|")[number])


def rooms() -> list[Path]:
    """Folders and patterns in the table of rooms; a bare name is a neighbour of the one before."""
    found: list[Path] = []
    for name in column("The rooms", 0):
        found.append(ROOT / name if "/" in name else found[-1].parent / name)
    return found


# words that lean on what a reader has not seen
LEANING = re.compile(r"(Of|Those|The same|As|Where)\b")


def documented() -> Iterator[tuple[str, str]]:
    """The place of each docstring, private ones too, and its text."""
    for path in (path for package in packages() for path in package.glob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                place = f"{name}:{getattr(node, 'lineno', 1)}"
                yield place, ast.get_docstring(node) or ""


def test_docstrings_can_be_understood_alone() -> None:
    assert [place for place, text in documented() if LEANING.match(text)] == []


# words that say what was done to a thing, and not what it is: no names
PARTICIPLES = frozenset(("told", "found", "known", "asked", "own", "said"))
# names that users read: a key of `ddpsim.sweep/1`
PUBLIC = {("ddpsim/result/sweep.py", "own")}


def bound(node: ast.AST) -> str:
    """The name that a node of a syntax tree gives to something; empty if it gives none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.alias(asname=str(name)):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return name
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return name
    return ""


def named_by_participles() -> Iterator[str]:
    """The place and name of each thing that is named by a participle alone."""
    for path in (path for package in packages() for path in package.glob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = bound(node)
            if name.strip("_").lower() in PARTICIPLES and (file, name) not in PUBLIC:
                yield f"{file}:{getattr(node, 'lineno', 1)} {name}"


def test_names_say_what_a_thing_is() -> None:
    assert list(named_by_participles()) == []


def test_every_package_has_a_docstring() -> None:
    for package in packages():
        tree = ast.parse((package / "__init__.py").read_text("utf-8"))
        assert ast.get_docstring(tree), package


def test_every_room_of_the_map_is_there() -> None:
    for room in rooms():
        assert list(room.parent.glob(room.name)), room


def test_every_package_is_on_the_map() -> None:
    """By its own name, or as the folder of the rooms that are."""
    named = rooms()
    for package in packages():
        assert package in named or any(package in room.parents for room in named), package


def changed() -> list[Path]:
    """What the map sends a reader to.

    A path in the table is one in ddpsim; a bare name stands in the folder before it.
    """
    folder, found = ROOT, []
    for name in column("Where to change what", 1):
        path = next(
            (base / name for base in (ROOT, ROOT / "ddpsim", folder) if list(base.glob(name))), None
        )
        assert path, name
        folder = path if path.is_dir() else path.parent
        found.append(path)
    return found


def test_what_the_map_sends_a_reader_to_is_there() -> None:
    """Files and folders, and in them the names that it gives."""
    files = [path for path in changed() if path.suffix == ".py"]
    texts = "".join(path.read_text("utf-8") for path in files)
    names = list(column("Where to change what", 2))
    assert len(names) > 10
    is_defined = r"^(?:def |class |){}\b[(:\[ ]"
    assert [n for n in names if not re.search(is_defined.format(n), texts, re.MULTILINE)] == []


def test_every_file_elsewhere_on_the_map_is_there() -> None:
    paths = re.findall(r"`((?:ddpsim|calibrate|tests|tools|docs)/[\w/.-]+\.\w+)`", MAP)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_no_constant_of_a_module_is_set_twice() -> None:
    """The second value would hold for the first one's uses too, which nothing else notices."""
    for path in (path for package in packages() for path in package.glob("*.py")):
        names = [
            target.id
            for node in ast.parse(path.read_text("utf-8")).body
            for target in (node.targets if isinstance(node, ast.Assign) else ())
            if isinstance(target, ast.Name) and target.id.isupper()
        ]
        assert len(names) == len(set(names)), path
