"""--help is one screen in sections, and a shell completes what it lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

SECTIONS = {
    "Predict": ["run", "diagnose", "replay", "explain-step", "explore", "collective"],
    "Plan": ["sweep", "compare", "tune", "plan"],
    "Calibrate": ["calibrate"],
    "Files": ["init", "check", "schema", "explain", "list", "import", "trace", "report"],
}
COMMANDS = [name for names in SECTIONS.values() for name in names if name != "calibrate"]
Cli = Callable[..., Outcome]


@pytest.mark.parametrize("arguments", [["--help"], []], ids=["--help", "no argument"])
def test_help_is_one_screen(cli: Cli, arguments: list[str]) -> None:
    outcome = cli(*arguments)
    lines = (outcome.out + outcome.err).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert sections(lines) == SECTIONS


def sections(lines: list[str]) -> dict[str, list[str]]:
    """The first word of every row, by the heading above it, after the options."""
    found: dict[str, list[str]] = {}
    for line in lines[lines.index("Predict:") :]:
        if line.endswith(":") and not line.startswith(" "):
            found[line[:-1]] = []
        elif line.strip():
            found[list(found)[-1]].append(line.split()[0])
    return found


@pytest.mark.parametrize("width", [52, 80])
def test_help_fits_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli("--help").out.splitlines()
    assert sections(lines) == SECTIONS
    listed = lines[lines.index("Predict:") :]
    assert max(map(len, listed)) <= width
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ddpsim s", ["sweep", "schema"]),
        ("ddpsim run --mea", ["--measured"]),
        ("ddpsim run --set cluster.machine=dgx-h", ["dgx-h100", "dgx-h200"]),
        ("ddpsim run --set ddp.bucket_c", ["ddp.bucket_cap_mb"]),
        ("ddpsim collective --machine p5e", ["p5e.48xlarge", "p5en.48xlarge"]),
        ("ddpsim list ma", ["machines"]),
        ("ddpsim init strag", ["straggler"]),
    ],
)
def test_a_shell_completes_commands_and_options(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # as the script ddpsim, no -m
    monkeypatch.setenv("_DDPSIM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    assert [row.rpartition("=")[2] for row in cli().out.splitlines()] == offered


def test_completion_is_installed_for_the_shell(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    done = cli("--install-completion")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("bash completion installed in ")
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_DDPSIM_COMPLETE=complete_bash" in script.read_text("utf-8")
    assert str(script) in (tmp_path / ".bashrc").read_text("utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.code == 0
    assert f"  ddpsim {command}" in outcome.out
    assert len(outcome.out.splitlines()) <= 40
