"""How the command line starts: with few imports, and without typer where a run asks for little."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from outcome import Outcome

from ddpsim.cli.start import plain_run
from ddpsim.scenario.starters import preset_text

HEAVY = ("torch", "scipy", "plotly", "jinja2", "numpy", "typer", "email")
Cli = Callable[..., Outcome]


def _imported(*arguments: str) -> set[str]:
    """Which heavy packages a fresh process has imported once the command is done."""
    script = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules], "
        "file=sys.stderr))\n"
        "from ddpsim.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return {name for name in HEAVY if repr(name) in done.stderr}


@pytest.mark.parametrize(
    ("settings", "imported"),
    [([], set()), (["--set", "run.jitter={sigma: 0.01}"], {"numpy"})],
    ids=["plain", "jitter"],
)
def test_a_run_imports_little(tmp_path: Path, settings: list[str], imported: set[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(preset_text("resnet50-8xa100"), encoding="utf-8")
    assert _imported("run", str(path), *settings) == imported


def test_what_is_imported_only_when_used_works_as_ever() -> None:
    """Functions that others import from it, names that nobody foresaw, and its errors."""
    script = (
        "from ddpsim.cli.start import import_when_used\n"
        "import_when_used('importlib.metadata', ('version',))\n"
        "from importlib.metadata import version\n"
        "import importlib.metadata as metadata, sys\n"
        "assert 'email' not in sys.modules\n"
        "assert version('pydantic') == metadata.distribution('pydantic').version\n"
        "try: version('no such package')\n"
        "except metadata.PackageNotFoundError: print('as ever')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("as ever\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.yaml"],
        ["a.yaml", "--json"],
        ["--set", "a.b=1", "--verbose", "a.yaml", "--set", "c.d={e: --f}", "--json", "--json"],
    ],
    ids=str,
)
def test_typer_and_the_way_without_it_read_a_run_alike(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    asked: list[tuple[Path, tuple[str, ...], float | None, str, bool, bool]] = []

    def predict(
        file: Path,
        settings: Sequence[str],
        measured_s: float | None = None,
        engine: str = "auto",
        required: Sequence[object] = (),
        *,
        as_json: bool,
        verbose: bool,
    ) -> None:
        assert not required
        asked.append((file, tuple(settings), measured_s, engine, as_json, verbose))

    monkeypatch.setattr("ddpsim.cli.predict.predict", predict)
    assert plain_run(["run", *arguments]) is not None
    assert cli("run", *arguments) == (0, "", "")
    monkeypatch.setattr("ddpsim.cli.start.plain_run", lambda _: None)
    assert cli("run", *arguments) == (0, "", "")
    assert len(asked) == 2
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["run"], ["run", "a", "b"], ["run", "a", "--help"], ["run", "a", "--set"]),
        *(["run", "a", "--set", "--json"], ["run", "a", "--set="], ["run", "--", "a"]),
        *(["run", "a", "--measured", "1 ms"], ["run", "a", "--engine", "auto"], ["run", ""]),
        *(["check", "a"], ["--version"], ["run", "a", "--jsn"], ["run", "-"]),
    ],
    ids=str,
)
def test_all_else_is_left_to_typer(arguments: list[str]) -> None:
    assert plain_run(arguments) is None


def test_completion_is_left_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DDPSIM_COMPLETE", "complete_bash")
    assert plain_run(["run", "a.yaml"]) is None
