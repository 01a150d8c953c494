"""What the commands answer, from Python: each takes a scenario first, then its own options.

A scenario is a YAML file, the same as a mapping, or a `Scenario`. Other keyword arguments are
settings of the scenario, as `--set` takes them: `cluster__nodes=4`, `**{"cluster.nodes": 4}`, or
`bucket_cap_mb=50` where one section alone has a key of that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ddpsim.engine.run import EngineMode
    from ddpsim.planning.sweeps.grid import Grid
    from ddpsim.planning.sweeps.sweep import Progress
    from ddpsim.result.capacity import CapacityPlan, Money
    from ddpsim.result.changes import Comparison, Explanation, Tuning
    from ddpsim.result.diagnosis import Diagnosis
    from ddpsim.result.model import Result
    from ddpsim.result.sweep import Sweep
    from ddpsim.scenario.document import Document, Source
    from ddpsim.scenario.schema import Scenario


def run(source: Source, *, engine: EngineMode = "auto", **settings: Any) -> Result:
    """Predict one steady training step, as `ddpsim run` does.

    `engine` "reference" simulates every rank and every ring step. Raises ScenarioError with all
    problems of the scenario.

    >>> ddpsim.run("scenario.yaml", bucket_cap_mb=50).bottleneck.kind
    'communication'
    """
    from ddpsim.prediction.api import load_and_simulate

    return load_and_simulate(source, _texts(settings), engine)[1]


def tune(
    source: Source,
    *,
    memory: str | None = None,
    global_batch: int | None = None,
    may_round: bool = False,
    trials: int = 0,
    each_strategy: bool = False,
    **settings: Any,
) -> Tuning:
    """Find the best bucket caps and options, as `ddpsim tune` does.

    `memory`: at most this on a GPU, as in "70 GB". `global_batch`: samples of a step; micro-batches
    and accumulation are then chosen too. `may_round`: gradients may be sent in 16 bits. `trials`:
    lists of caps that Optuna tries after the grid. `each_strategy`: other strategies than DDP too.
    Raises ScenarioError.
    """
    from ddpsim.planning.tune import Limits
    from ddpsim.planning.tune import tune as search
    from ddpsim.units import parse_bytes

    room = None if memory is None else parse_bytes(memory)
    document = _document(source, settings)
    return search(document, Limits(room, global_batch, may_round, trials, each_strategy))


def compare(
    source: Source,
    *others: Source,
    each_flag: bool = False,
    each_strategy: bool = False,
    **settings: Any,
) -> Comparison:
    """Compare a scenario with `others`, with each option of DDP, or with each other strategy.

    The settings are those of all scenarios. Raises ScenarioError, and ValueError where there is
    nothing to compare with.
    """
    if not (others or each_flag or each_strategy):
        raise ValueError("compare with what? Give a second scenario, each_flag or each_strategy")
    return compare_documents(
        _document(source, settings),
        [(_title(other), _document(other, settings)) for other in others],
        each_flag=each_flag,
        each_strategy=each_strategy,
        name=_title(source),
    )


def compare_documents(
    document: Document,
    others: Sequence[tuple[str, Document]],
    *,
    each_flag: bool,
    each_strategy: bool,
    name: str,
) -> Comparison:
    """Compare a document with others by their titles, and with options; raises ScenarioError."""
    from ddpsim.planning import compare as comparing
    from ddpsim.planning.shardings import own_options
    from ddpsim.prediction.api import checked
    from ddpsim.scenario.load import parse
    from ddpsim.scenario.set_aside import as_ddp

    stated = document
    if each_strategy:
        document = document.changed(as_ddp(parse(document).ddp))
    first = checked(document)
    options = [comparing.option(other, title=title) for title, other in others]
    if each_flag:
        options += comparing.each_flag(document)
    if each_strategy:
        options += comparing.each_strategy(document, own_options(stated))
        strategy = parse(stated).ddp.strategy
        if strategy in ("distributed_optimizer", "fsdp1"):
            options.append(comparing.option(stated, title=strategy))
    baseline = f"{name} {'under ddp' if each_strategy else 'as it is'}"
    return comparing.compare(first, options, baseline)


def explain_step(source: Source, **settings: Any) -> Explanation:
    """Say why a step is so long, and what would shorten it; raises ScenarioError."""
    from ddpsim.planning.explain import explain_step as explain
    from ddpsim.prediction.api import checked

    document = _document(source, settings)
    checked(document)
    return explain(document)


def plan(
    source: Source,
    target: str,
    *,
    price: Money | str | None = None,
    budget: Money | str | None = None,
    global_batch: int | None = None,
    max_gpus: int = 1024,
    critical_batch: int | None = None,
    steps_by_batch: str | Path | None = None,
    **settings: Any,
) -> CapacityPlan:
    """Say how many GPUs a piece of work needs, and what they cost, as `ddpsim plan` does.

    `target`: "90 epochs of 1.28M samples in 24 h", or "300B tokens". The options are those of
    `plan_capacity`, which raises as this does.
    """
    from ddpsim.planning.capacity_plan.plan import plan_capacity

    return plan_capacity(
        _scenario(source, settings),
        target,
        price=price,
        budget=budget,
        global_batch=global_batch,
        max_gpus=max_gpus,
        critical_batch=critical_batch,
        steps_by_batch=steps_by_batch,
    )


def diagnose(
    source: Source,
    measured: str | float | None = None,
    *,
    without_sync: str | None = None,
    exposed: str | None = None,
    data_wait: str | None = None,
    all_reduce: str | None = None,
    nccl_log: str | Path | None = None,
    traces: str | Path | None = None,
    **settings: Any,
) -> Diagnosis:
    """Rank the causes of a slow job by what was measured of it, as `ddpsim diagnose` does.

    `measured`: seconds of a step, or text: "916 ms", "1 GPU: 192 ms, 2x4: 1.2 s", "accumulation 4:
    2 s" or "batch 16: 1 s". Of the scenario's own ranks: `without_sync`, a step under no_sync();
    `exposed`, in which the GPU waits for communication; `data_wait`, in which it waits for a batch
    ("synthetic": never); `all_reduce`, rows of nccl-tests as in "25 MiB: 3 ms"; `nccl_log`, what
    NCCL_DEBUG=INFO printed; `traces`, a folder with the profiler's traces. Raises InputError for
    text that does not say this, ImportFailedError for files of another job, and ScenarioError.
    """
    from ddpsim.diagnosis.diagnose import diagnose as find

    return find(
        _scenario(source, settings),
        f"{measured!r} s" if isinstance(measured, (int, float)) else measured,
        without_sync=without_sync,
        exposed=exposed,
        data_wait=data_wait,
        all_reduce=all_reduce,
        nccl_log=nccl_log,
        traces=traces,
    )


def sweep(
    source: Source,
    grid: Grid | Mapping[str, Sequence[Any]],
    goals: Sequence[str] = ("throughput",),
    *,
    progress: Progress = lambda *_: None,
    **settings: Any,
) -> Sweep:
    """Predict every combination of values, and name the best, in this process.

    `grid`: values by dotted key, or a `Grid` as `--set` says it. `goals`: one or two of
    throughput, per-gpu, efficiency, step, exposed, gpus and memory. `progress` hears how many
    points have ended, and of how many. A point that cannot be simulated says why, and the others
    go on. Raises ScenarioError if none can, and ValueError for other goals.

    >>> ddpsim.sweep("scenario.yaml", {"bucket_cap_mb": [1, 25]}).best.settings[0].value
    '25'
    """
    from ddpsim.planning.sweeps.grid import Axis, Grid
    from ddpsim.planning.sweeps.sweep import sweep as over

    if not isinstance(grid, Grid):
        keys = ((_key(key), values) for key, values in grid.items())
        axes = (Axis((key,), tuple((_text(value),) for value in values)) for key, values in keys)
        grid = Grid((), tuple(axes))
    return over(_document(source, settings), grid, goals, progress=progress)


def write_report(
    source: Source,
    output: str | Path = "step.html",
    *,
    against: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """Write the page that `ddpsim report` writes, and return its path.

    `against`: settings such as "ddp.strategy=naive", each drawn below the step. Raises
    ScenarioError, OSError, and ImportError without plotly and jinja2.
    """
    from ddpsim.files import write_atomically
    from ddpsim.planning.storyboard import storyboard
    from ddpsim.report.page.page import page

    path = Path(output)
    board = storyboard(_document(source, settings), against=tuple(against))
    write_atomically(path, page(board))
    return path


def write_trace(
    source: Source,
    folder: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    steps: int | Literal["all"] | None = None,
    warmup: bool = False,
    compressed: bool = False,
    **settings: Any,
) -> Path:
    """Write a run's traces, and return the path of the one of all ranks, for Perfetto.

    `ranks`: None: all up to 16, of more a sample. `steps`: how many steady ones, or "all"; None:
    three. `warmup`: begin with the warm-up's. Raises ScenarioError, InputError for a step or
    ValueError for a rank that is not there, and OSError.
    """
    from ddpsim.planning.trace import trace as part
    from ddpsim.planning.trace import write_traces

    traced = part(_scenario(source, settings), ranks, steps, warmup=warmup)
    return Path(write_traces(traced, Path(folder), compressed=compressed).merged)


def _scenario(source: Source, settings: Mapping[str, Any]) -> Scenario:
    from ddpsim.prediction.api import load_scenario

    return load_scenario(source, _texts(settings))


def _document(source: Source, settings: Mapping[str, Any]) -> Document:
    from ddpsim.scenario.document import load

    return load(source, _texts(settings))


def _title(source: Source) -> str:
    return str(source) if isinstance(source, (str, Path)) else "the scenario"


def _texts(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings as `--set` takes them."""
    return (f"{_key(name)}={_text(value)}" for name, value in settings.items())


def _key(name: str) -> str:
    """A key's dotted path; a name alone is a section's key, if one section alone has it."""
    from ddpsim.scenario.keys import keys_named

    path = name.replace("__", ".")
    keys = [key for key, _ in keys_named(path) if key.count(".") == 1]
    return keys[0] if len(keys) == 1 else path


def _text(value: Any) -> str:
    """A value as YAML; text as `--set` takes it."""
    return value if isinstance(value, str) else dumps(value, default=str)
