"""Every command and snippet of the pages runs, and prints what the pages say it prints.

What needs a cluster is held as far as one machine can: options of commands under torchrun are
parsed, scripts for schedulers are checked for syntax, and the commands in them too.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from doc_pages import DOCS, ROOT, Block, blocks, pages
from docs_claims import with_verdicts
from logs.kineto_writer import Step, Writer
from logs.measured_files import model_file
from logs.nccl_log_writer import nccl_log
from ruamel.yaml import YAML
from typer.main import get_command

import calibrate.cli
import ddpsim
from ddpsim.scenario import other_strategies
from ddpsim.scenario.keys import all_keys
from ddpsim.scenario.starters import preset_text

TIMES = {4**n * 1024: 20 + 4**n * 0.1 for n in range(10)}  # us: 20 us and 10 GB/s, nobody's
ELSEWHERE = ("srun", "dask", "helm", "kubectl", "marimo", "xdg-open", ".", "export")
READS_FILES_ALONE = ("capture", "import", "show")
MODEL = model_file(  # as `calibrate profile` writes one, nobody's
    [("w", 4_000_000, 0.020)],
    source="SYNTHETIC",
    device="NVIDIA A100-SXM4-80GB",
    optimizer="adamw",
    batch_per_rank=32,
    forward_s=0.010,
    backward_s=0.020,
    optimizer_s=0.002,
)
_SAID: dict[tuple[str, ...], str] = {}  # what commands printed that write no file


class Reader:
    """One who types in what a page says, in a folder with a scenario and two logs."""

    def __init__(self, cli: Callable[..., Any]) -> None:
        self.cli = cli
        self.names: dict[str, Any] = {}
        self.said = ""
        Path("scenario.yaml").write_text(preset_text("resnet50-2x8-25gbit"), "utf-8")
        Path("all_reduce.txt").write_text(nccl_log(root=True, gpus=8, times=TIMES), "utf-8")
        one_node = nccl_log(root=True, nodes=1, gpus=8, times=TIMES)
        Path("one-node.txt").write_text(one_node, "utf-8")
        Path("model.json").write_text(json.dumps(MODEL), "utf-8")
        core = json.loads((ROOT / "scenarios" / "measured-core.json").read_text("utf-8"))
        rates = {"fp32": 1e13, "bf16": 1e14}  # a GPU's, nobody's
        gpu = core | {"kind": "gpu", "peak_flops": rates}
        Path("device.json").write_text(json.dumps(gpu), "utf-8")
        copytree(ROOT / "tests" / "data" / "faults" / "competing", "traces")

    def read(self, block: Block) -> None:
        """Do what a block says."""
        if "cluster.json" in block.body and not Path("cluster.json").exists():
            self._ddpsim(
                ["calibrate", "import", "nccl-tests", "all_reduce.txt", "-o", "cluster.json"]
            )
        if block.title:
            Path(block.title).write_text(block.body, "utf-8")
        getattr(self, f"_{block.language or 'formula'}")(block.body)

    def _formula(self, text: str) -> None:
        """Nothing to run."""

    _csv = _log = _toml = _formula

    def _sh(self, text: str) -> None:
        for line in text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                self._command(words, line)

    def _command(self, words: Sequence[str], line: str) -> None:
        if words[0] == "ddpsim" and words[1] != "calibrate":
            self._ddpsim(words[1:])
        elif "calibrate" in words:
            options = words[words.index("calibrate") + 1 :]
            if words[0] == "ddpsim" and options[0] in READS_FILES_ALONE:
                self._ddpsim(words[1:])
            else:
                parse(options)
        elif words[:2] == ["pip", "install"]:
            has_extras(words[2])
        elif words[0] == "sbatch" and "--wrap" not in words:
            assert Path(words[-1]).exists()
        else:
            assert words[0] in ELSEWHERE, line
            is_bash(line)

    def _ddpsim(self, words: Sequence[str]) -> None:
        """Run a command here; one that reads the scenario alone was perhaps run before."""
        arguments, _, file = (part.strip() for part in shlex.join(words).partition("'>'"))
        key = (Path("scenario.yaml").read_text("utf-8"), arguments)
        if "-o" in words or key not in _SAID:
            done = self.cli(*shlex.split(arguments))
            fails = "does not fit" in done.err  # which is no success
            assert done.code == int(fails), (words, done.err)
            _SAID[key] = done.out
        self.said = _SAID[key]
        if file:
            Path(file).write_text(self.said, "utf-8")

    def _bash(self, text: str) -> None:
        is_bash(text)
        for line in text.replace("\\\n", " ").splitlines():
            words = [re.sub(r"\$\w+|\$\{.*?\}", "1", word) for word in line.split()]
            if words[:1] == ["ddpsim"]:
                assert words[1] in get_command(ddpsim_app()).commands  # type: ignore[attr-defined]

    def _text(self, text: str) -> None:
        """An excerpt of what the last command said; `...` stands for lines that are left out."""
        rest = self.said
        for part in excerpts(text):
            assert part in rest, f"{part}\nis not in\n{self.said}"
            rest = rest.partition(part)[2]

    def _json(self, text: str) -> None:
        json.loads(text)

    def _yaml(self, text: str) -> None:
        read = YAML(typ="safe", pure=True).load(text)
        if "apiVersion" in read:
            return
        base = YAML(typ="safe", pure=True).load(Path("scenario.yaml").read_text("utf-8"))
        ddpsim.load_scenario(read if "schema" in read else merged(base, read))

    def _python(self, text: str) -> None:
        exec(compile(text, "<page>", "exec"), self.names)

    def _pycon(self, text: str) -> None:
        runner, failures = _Runner(optionflags=doctest.NORMALIZE_WHITESPACE), list[str]()
        self._run(text, runner, failures.append)
        assert not failures, "".join(failures)

    def _run(self, text: str, runner: _Runner, out: Callable[[str], Any]) -> None:
        parsed = doctest.DocTestParser().get_doctest(text, self.names, "page", None, None)
        runner.run(parsed, out=out, clear_globs=False)
        self.names = parsed.globs

    def answered_anew(self, text: str) -> str:
        """A session with what it answers now."""
        runner = _Runner(optionflags=doctest.NORMALIZE_WHITESPACE)
        self._run(text, runner, lambda _: None)
        lines = text.splitlines(keepends=True)
        for example, got in reversed(runner.failed):
            first = example.lineno + example.source.count("\n")
            lines[first : first + example.want.count("\n")] = [got]
        return "".join(lines)


class _Runner(doctest.DocTestRunner):
    """Keep what examples answer in the place of what the page says."""

    def __init__(self, optionflags: int) -> None:
        super().__init__(optionflags=optionflags)
        self.failed: list[tuple[doctest.Example, str]] = []

    def report_failure(
        self, out: Callable[[str], Any], test: doctest.DocTest, example: doctest.Example, got: str
    ) -> None:
        self.failed.append((example, got))
        super().report_failure(out, test, example, got)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario with a section of a page in the place of its own keys.

    What times a model of one's own brings takes the place of the model that is there.
    """
    both = dict(base)
    for key, value in more.items():
        own = both.get(key)
        are_sections = isinstance(own, dict) and isinstance(value, dict)
        both[key] = merged(own, value) if are_sections else value
    if {"profile", "trace", "parameters"} & set(more):
        both.pop("model", None)
    return both


def ddpsim_app() -> Any:
    """The command line, with all of its commands."""
    from ddpsim.cli import app

    return app


def parse(words: Sequence[str]) -> None:
    """Hold the options of a command of `calibrate` against what it takes."""
    command: Any = get_command(calibrate.cli.app)
    names = [*words]
    while hasattr(command, "commands"):
        command = command.commands[names.pop(0)]
    command.make_context(words[0], [word for word in names if word != "..."])


def has_extras(requirement: str) -> None:
    """The extras that a requirement on ddpsim names exist."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.fullmatch(r"ddpsim\[(.*)\]", requirement)
    for extra in named[1].split(",") if named else ():
        assert f"\n{extra} = [" in project, extra


def is_bash(text: str) -> None:
    """A shell can read it."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def excerpts(text: str) -> Iterator[str]:
    """The parts of an excerpt between lines of `...`."""
    for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        if part.strip():
            yield part.strip("\n") + "\n"


def shown_anew(text: str, said: str) -> str:
    """An excerpt with the lines of another output: the next that differs in figures alone.

    Or else the only one that begins alike.
    """
    lines, out, behind = said.splitlines(), [], 0
    for line in text.splitlines():
        alike = [
            i for i, each in enumerate(lines) if i >= behind and words_of(each) == words_of(line)
        ]
        own = [each for each in lines if each.split()[:1] == line.split()[:1]]
        if line.strip() and alike:
            behind = alike[0] + 1
            out.append(lines[alike[0]])
        else:
            out.append(line if line in lines or len(own) != 1 else own[0])
    return "\n".join(out) + "\n"


def words_of(line: str) -> str:
    """A line without its figures and the room that they take."""
    return " ".join(re.sub(r"[-+]?[\d.,]+", "0", line).split())


def page_name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


@pytest.fixture
def reader(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(other_strategies, "_registered", {})  # those of one page alone
    monkeypatch.syspath_prepend(tmp_path)
    write_trace(tmp_path / "rank0.pt.trace.json.gz")
    return Reader(cli)


def write_trace(path: Path) -> None:
    """Three steps of a model of two parameters."""
    writer = Writer()
    for _ in range(3):
        writer.step(Step([900.0], [[700.0], [800.0]], [100.0], shapes=[(512, 512), (512,)]))
    writer.save(path)


@pytest.mark.parametrize("path", pages(), ids=page_name)
def test_a_page_does_what_it_says(
    path: Path, reader: Reader, request: pytest.FixtureRequest
) -> None:
    text = path.read_text("utf-8")
    anew = request.config.getoption("--update-golden")
    for block in reversed(list(read_all(reader, blocks(text), anew=anew))):
        text = text[: block.start] + block.body + text[block.end :]
    if path.name == "claims.md":
        made = with_verdicts(text, reader.names)
        assert anew or made == text, "the table is not that of the figures: --update-golden"
        text = made
    if anew:
        path.write_text(text, "utf-8")


def read_all(reader: Reader, found: Sequence[Block], *, anew: bool) -> Iterator[Block]:
    """Read blocks in order; those whose output is another one now come back with that."""
    for block in found:
        if anew and block.language == "text":
            body = shown_anew(block.body, reader.said)
        elif anew and block.language == "pycon":
            body = reader.answered_anew(block.body)
        else:
            reader.read(block)
            continue
        if body != block.body:
            yield block._replace(body=body)


def test_an_exercises_command_is_one() -> None:
    """They are parsed: what they answer is tested where it is computed."""
    commands = get_command(ddpsim_app()).commands  # type: ignore[attr-defined]
    text = (DOCS / "how-to" / "exercises.md").read_text("utf-8")
    found = re.findall(r"`ddpsim ([^`]+)`", text)
    assert len(found) > 20
    for name, *words in map(shlex.split, found):
        context = commands[name].make_context(name, words)
        keys = {each.partition("=")[0] for each in context.params.get("settings") or ()}
        assert keys <= set(all_keys())


def test_the_tutorials_arithmetic() -> None:
    """What the cheaper cluster saves, of the two answers that the page shows."""
    text = (DOCS / "tutorial" / "index.md").read_text("utf-8")
    costs = [float(cost) for cost in re.findall(r"^answer .* ([\d.]+) USD$", text, re.MULTILINE)]
    gpus = [int(count) for count in re.findall(r"^answer +(\d+) GPUs", text, re.MULTILINE)]
    prices = [float(price) for price in re.findall(r"\| ([\d.]+) USD \|", text)]
    assert f"costs {1 - prices[0] / prices[1]:.0%} less".replace("%", " %") in text
    assert f"costs {prices[1] / prices[0] - 1:.0%} more an hour".replace("%", " %") in text
    assert f"{1 - costs[1] / costs[0]:.0%} less for the job".replace("%", " %") in text
    assert gpus[0] == 2 * gpus[1]  # "half of the GPUs"
    assert abs(costs[2] / costs[1] - 1) < 0.05  # "as cheap as cluster B"
