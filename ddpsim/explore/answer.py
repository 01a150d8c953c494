"""The one function that the page calls: a question in, an answer of JSON's types out.

A question names its `part` and holds the scenario: YAML as `text`, and `settings` to change in it.
`part` is one of:

start    the text to begin with, what the controls offer, the lessons
step     the step drawn, with its figures, without an interval: within a fraction of a second
sure     interval, cost, what to try next, a month with its failures
scaling  throughput on other numbers of nodes, as a drawing
report   the page that `ddpsim report` writes, as text

An answer is of schema ddpsim.explore/1. What is wrong with a scenario comes as `problems`, each
with its line and column.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpsim.errors import DdpsimError, InputError, Problem, ScenarioError, not_here, printable
from ddpsim.explore.controls import controls, leaving, places
from ddpsim.explore.edit import edited
from ddpsim.explore.events import events
from ddpsim.explore.lessons import LESSONS, SCENARIO
from ddpsim.files import json_of
from ddpsim.importers.prices import listed_price, read_prices
from ddpsim.planning.dials import dialled, strategies
from ddpsim.planning.storyboard import draw, node_counts, storyboard
from ddpsim.prediction.api import checked_job, predicted
from ddpsim.prediction.job import Job
from ddpsim.prediction.next_steps import next_steps
from ddpsim.prediction.parts import Parts
from ddpsim.report.capacity.long_run import month_rows
from ddpsim.report.page.charts import scaling_figure
from ddpsim.report.page.tables import bucket_rows, parts
from ddpsim.report.page.timeline import drawn_ranks, looks, span_ns
from ddpsim.result.model import Memory, Result, edges_in_words, interval_name
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.starters import preset_text
from ddpsim.units import format_bytes, format_duration, format_number, format_percent
from ddpsim.version import __version__
from ddpsim.wording import ranks

SCHEMA = "ddpsim.explore/1"
_MOST_BYTES = 256 * 1024  # of a scenario's text
_MOST_SETTINGS = 200
_MOST_IN_BROWSER = 1024  # ranks: WebAssembly takes some ten times as long
_MEMORY = ("parameters", "gradients", "buckets", "optimizer", "buffers", "activations")


@dataclass(frozen=True)
class Given:
    """What a page begins with: a scenario's text, what commands call it, and its folder.

    `files`: the only ones that a scenario may name; `most_ranks`: of a step that is simulated.
    """

    name: str
    text: str
    base: Path = field(default_factory=Path)
    most_ranks: int = 16_384
    lesson: str = ""
    files: frozenset[str] = frozenset()

    def with_files(self) -> Given:
        """Return it with the files that its scenario names; raises ScenarioError."""
        document = Document.of_text(self.text, self.name, self.base)
        return replace(self, files=frozenset(_texts(document.data)))


def answer(question: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """Answer one question of the page, see above; errors of a scenario come as problems."""
    part = question.get("part")
    if part == "start":
        return {"schema": SCHEMA, "part": part, **_start(given)}
    text = ""
    try:
        text = _text(question, given)
        answered = _PARTS[str(part)](_document(text, given))
    except ScenarioError as error:
        return {**problem(str(part), *error.problems), "text": text}
    except DdpsimError as error:
        return {**problem(str(part), Problem(given.name, "", error.reason)), "text": text}
    return {"schema": SCHEMA, "part": part, "text": text, **answered}


def answered(question: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """What `answer` returns; a fault of ours, or of an installation, is a problem, too."""
    try:
        return answer(question, given)
    except ImportError as error:
        reason = not_here(error)
    except Exception:  # noqa: BLE001 -- the page goes on
        traceback.print_exc()
        reason = "a fault of ddpsim; the terminal, or the browser's console, says more"
    return problem(str(question.get("part")), Problem(given.name, "", reason))


def json_answer(question: str) -> str:
    """Answer a question of a page without a server, both as JSON; no file can be named."""
    given = Given("scenario.yaml", preset_text(SCENARIO), most_ranks=_MOST_IN_BROWSER)
    return json.dumps(answered(json_of(question), given))


def problem(part: str, *problems: Problem) -> dict[str, Any]:
    """An answer that says what is wrong."""
    listed = [
        {"line": line, "column": column, "key": each.key, "message": printable(each.message)}
        for each in problems
        for line, column in [_place(each.where)]
    ]
    return {"schema": SCHEMA, "part": part, "problems": listed}


def _place(where: str) -> tuple[int, int]:
    """Line and column of a place; zeros where it has none."""
    *_, line, column = ("", *where.rsplit(":", 2))
    is_place = where.count(":") > 1 and line.isdecimal() and column.isdecimal()
    return (int(line), int(column)) if is_place else (0, 0)


def _text(question: Mapping[str, Any], given: Given) -> str:
    """The YAML of a question, with its settings written into it; raises ScenarioError."""
    text, settings, part = (question.get(key) for key in ("text", "settings", "part"))
    are_texts = isinstance(settings, list) and all(isinstance(each, str) for each in settings)
    if part not in _PARTS or not isinstance(text, str) or not are_texts or settings is None:
        wanted = f"wanted part ({', '.join(_PARTS)}), text and a list of settings"
        raise ScenarioError([Problem(given.name, "", wanted)])
    if len(text.encode("utf-8", "replace")) > _MOST_BYTES or len(settings) > _MOST_SETTINGS:
        most = f"{_MOST_BYTES >> 10} KiB and {_MOST_SETTINGS} settings"
        raise ScenarioError([Problem(given.name, "", f"is too long for this page: {most} at most")])
    if settings:  # a wrong one says so before it is written
        Document.of_text(text, given.name, given.base).changed(settings)
    return edited(text, settings) if settings else text


def _document(text: str, given: Given) -> Document:
    """A scenario that is small enough for this page; raises ScenarioError."""
    document = Document.of_text(text, given.name, given.base, given.files)
    size = parse(document).cluster.world_size
    if size > given.most_ranks:
        most = f"{size:,} ranks are more than the {given.most_ranks:,} of this page"
        error = InputError("cluster.nodes", f"{most}; use ddpsim run, or --max-ranks")
        raise ScenarioError([document.blame(error)])
    return document


def _start(given: Given) -> dict[str, Any]:
    return {
        "name": given.name,
        "text": given.text,
        "version": __version__,
        "controls": controls(given.most_ranks),
        "looks": looks(),
        "lesson": given.lesson,
        "lesson_text": preset_text(SCENARIO),
        "lessons": [asdict(lesson) for lesson in LESSONS],
    }


def _step(document: Document) -> dict[str, Any]:
    job = checked_job(document)
    dial, option, _ = dialled(job.scenario) or strategies(job.scenario)
    choice, typical = draw(job, option, dial, with_interval=False)
    result = choice.result
    gone_through = events(choice, typical, job.bucket_names)
    return {
        "name": printable(result.name),
        "ranks": ranks(result.nodes, result.gpus_per_node, result.gpus_by_node),
        "inputs": dict(_flat(document.data)),
        "controls": places(job.scenario),
        "leaving": leaving(job.scenario.ddp),
        "facts": _facts(result),
        "bottleneck": {"kind": result.bottleneck.kind, "text": result.bottleneck.text},
        "warnings": [printable(warning) for warning in result.warnings],
        "timeline": {"span_ns": span_ns([choice.step]), "ranks": drawn_ranks(choice.step)},
        "events": [asdict(event) for event in gone_through],
        "breakdown": [
            {"name": part.name, "text": format_duration(part.time_s), "share": part.share}
            | {"colour": part.look.colour, "over": part.look.over, "hatched": part.look.hatched}
            for part in parts(result)
        ],
        "sent_in": "bucket" if job.scenario.ddp.is_ddp else dial.sent.lower(),
        "buckets": [
            {
                "index": row.bucket.index,
                "size": format_bytes(row.bucket.size_bytes),
                "parameters": row.bucket.num_params,
                "ready": format_duration(row.bucket.ready_s),
                "start": format_duration(row.bucket.start_s),
                "end": format_duration(row.bucket.end_s),
                "exposed": format_duration(row.exposed_s),
                "names": row.bucket.names,
            }
            for row in bucket_rows(choice)
        ],
        "memory": _memory(result.memory_bytes_per_gpu),
    }


def _facts(result: Result) -> list[dict[str, Any]]:
    """The headline: each figure as a number and as text; `less`: whether less of it is better."""
    hidden_s = result.comm_time_s - result.exposed_comm_s
    rate, memory = result.throughput_samples_per_s, result.memory_bytes_per_gpu
    figures = [
        ("step", "Step", result.iteration_time_s.mean, format_duration, True),
        ("exposed", "Exposed comm", result.exposed_comm_s, format_duration, True),
        ("hidden", "Hidden comm", hidden_s, format_duration, None),
        ("communication", "Comm in flight", result.comm_time_s, format_duration, None),
        ("throughput", "Samples/s", rate, format_number, False),
        ("scaling", "Scaling", result.scaling_efficiency, format_percent, False),
        ("memory", "Memory", memory.total, format_bytes, True),
    ]
    return [
        {"key": key, "name": name, "value": value, "text": words(value), "less": less}
        for key, name, value, words, less in figures
    ]


def _memory(memory: Memory) -> dict[str, Any]:
    held = {name: getattr(memory, name) for name in _MEMORY}
    return {
        "parts": [
            {"name": name, "text": format_bytes(size), "share": size / memory.device}
            for name, size in held.items()
            if size
        ],
        "total": format_bytes(memory.total),
        "device": format_bytes(memory.device),
        "fits": memory.fits,
        "unknown": [name for name, size in held.items() if size is None],
    }


def _sure(document: Document) -> dict[str, Any]:
    job = checked_job(document)
    result = predicted(job)
    interval, training = result.prediction_interval_s, result.training
    month = None
    if job.scenario.reliability:
        from ddpsim.planning.capacity_plan.long_run import month_of  # noqa: PLC0415 -- numpy

        month = month_of(document, job, result)
    return {
        "interval": {"name": interval_name(interval), "text": edges_in_words(interval)},
        "sources": [
            {"input": source.input, "basis": source.basis}
            | {"text": f"{_signed('-', source.low_s)} {_signed('+', source.high_s)}"}
            for source in (interval.sources if interval else ())
            if source.low_s or source.high_s
        ],
        "stragglers": [f"{s.text}: {format_duration(s.cost_s)} a step" for s in result.stragglers],
        "mfu": format_percent(training.mfu) if training and training.mfu else None,
        "cost": list(_cost(job, result)),
        "month": [list(row) for row in month_rows(month)] if month else [],
        "next": [
            {"why": printable(step.why), "settings": list(step.settings)}
            for step in next_steps(job, result)
        ],
    }


def _signed(sign: str, time_s: float) -> str:
    return f"{sign if time_s else ''}{format_duration(time_s)}"


def _cost(job: Job, result: Result) -> Iterator[dict[str, Any]]:
    """What a million samples and an epoch take in GPU-hours, and in money by list prices."""
    machine = job.scenario.cluster.machine
    try:
        price = listed_price(read_prices(), machine.name if machine else None, "on-demand")
    except InputError:
        price = None
    a_gpu_hour = price.gpu_hour("on-demand") if price else None
    samples = {"a million samples": 1e6 / result.throughput_samples_per_s}
    if result.training and (epoch := result.training.epoch):
        samples["an epoch"] = epoch.time_s
    for what, time_s in samples.items():
        hours = time_s / 3600 * result.gpus
        yield {"what": what, "time": format_duration(time_s), "gpu_hours": format_number(hours)} | {
            "money": f"{a_gpu_hour * hours:,.2f} {price.currency}"
            if a_gpu_hour and price
            else None,
            "source": f"{price.provider}, on-demand, {price.date}" if price else None,
        }


def _scaling(document: Document) -> dict[str, Any]:
    shared = Parts()

    def point(nodes: int) -> Result | str:
        try:
            changed = document.changed([f"cluster.nodes={nodes}"])
            return predicted(checked_job(changed, shared.of_another_question()))
        except DdpsimError as error:
            return f"{nodes} nodes: {error.reason}"
        except ImportError as error:
            return f"{nodes} nodes: {not_here(error)}"

    tried = [point(nodes) for nodes in node_counts(parse(document).cluster)]
    points = [each for each in tried if isinstance(each, Result)]
    left_out = [each for each in tried if isinstance(each, str)]
    return {"figure": scaling_figure(points) if points else None, "left_out": left_out}


def _report(document: Document) -> dict[str, Any]:
    from ddpsim.report.page.page import page  # noqa: PLC0415 -- jinja2, which steps do without

    return {"html": page(storyboard(document))}


_PARTS: dict[str, Callable[[Document], dict[str, Any]]] = {
    "step": _step,
    "sure": _sure,
    "scaling": _scaling,
    "report": _report,
}


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value by its dotted key, as text: what two scenarios differ in."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else f"{key}")
    else:
        yield path, str(data)


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _texts(each)
