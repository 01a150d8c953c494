"""Golden files, signals, a browser, and the command line in this process."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from chromium import Browser, chromium
from hypothesis import is_hypothesis_test, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from outcome import Outcome
from warm_python import serving

from ddpsim.cli import main

# every run draws the same examples, so that all see the same result; `nox -s explore` draws others.
# machines are shared: how long an example takes says nothing about it
settings.register_profile(
    "the same for all", max_examples=60, derandomize=True, database=None, deadline=None
)
settings.load_profile("the same for all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew; read the diff"
    )
    parser.addoption(
        "--explore",
        type=int,
        metavar="TIMES",
        help="property tests alone, with other examples than usual, TIMES as many",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist share out files in our order, and not by their numbers of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with files that have slow tests: what is left at the end is shared out evenly."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if times := config.getoption("--explore"):
        _explore(config, items, times)


def _explore(config: pytest.Config, items: list[pytest.Item], times: int) -> None:
    """Draw at random, remember failures, and print the example to paste."""
    known = DirectoryBasedExampleDatabase(config.rootpath / ".hypothesis" / "examples")
    items[:] = [item for item in items if is_hypothesis_test(getattr(item, "obj", None))]
    for item in items:
        test = getattr(item, "obj")  # noqa: B009 -- pytest's Item does not declare it
        own = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(
            own,
            max_examples=times * own.max_examples,
            derandomize=False,
            database=known,
            print_blob=True,
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage less often, and not among what was imported: that was a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _children_ignore_no_signal() -> Iterator[None]:
    """Start children with the default dispositions, whatever this process was started with.

    Under nohup, or in the background of a shell, SIGHUP or SIGINT is ignored. A child inherits
    that; it does not inherit a handler. One that does nothing leaves this process as it was.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """Compare a text with a file, or write the file under --update-golden."""

    def compare(text: str, path: Path) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def _commands() -> Iterator[None]:
    """Build the commands once, and not in every call: a process makes one, and it takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, _commands: None
) -> Callable[..., Outcome]:
    """Run `ddpsim ARGUMENTS` in this process: a start of Python costs half a second."""

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ddpsim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def warm_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("torch", reason="torch is not installed: nothing can be measured")
    with serving(tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture(scope="module")
def warm_python(warm_program: Path) -> Iterator[None]:
    """Start Python as a fork of one that has torch, where its start is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_program))
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: the page is not opened")
    opened = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
