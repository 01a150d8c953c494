"""Recognise a file by its content, and read what it says of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpsim.cluster.logs import LOGS, Logged
from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import json_of
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.chakra import is_of_chakra, read_chakra
from ddpsim.importers.configs.programs import LARGEST_CONFIG, Config, config_of, config_text
from ddpsim.importers.kineto.events import is_of_traces
from ddpsim.importers.kineto.ranks import read_rank_traces
from ddpsim.importers.measured import NoLayoutError, OtherCollectiveError
from ddpsim.importers.nccl.debug_log import LACKS_CONNECTIONS, debug_log
from ddpsim.importers.nccl.tests_log import has_rows
from ddpsim.importers.text import LARGEST_TEXT, foreign, foreign_text, header_of, lines_of, parts_of
from ddpsim.importers.training.bars import TooLittle
from ddpsim.importers.training.from_torch import (
    DdpLogging,
    ddp_logging,
    flight_recorder,
    is_dump,
    logged_data,
    unpickled,
)
from ddpsim.importers.training.step_lines import has_marks, step_lines, trainer_state
from ddpsim.recorded.traced_job import nccl_key, traced_job, usual_layout
from ddpsim.result.learned import Learned
from ddpsim.scenario import catalog
from ddpsim.scenario.quantity import SourceFile
from ddpsim.strategies.ddp.buckets import BUCKET_CAP_BYTES
from ddpsim.units import MIB, format_bytes, format_duration
from ddpsim.wording import counted, ranks

FORMATS = (
    "a log of NCCL_DEBUG=INFO or of nccl-tests (or OSU's, or all_reduce_bench.py's), our CSV, a "
    "trace of PyTorch's profiler or a folder of them, a Chakra execution trace, a dump of the "
    "flight recorder, DDP's logging data, trainer_state.json of transformers, and logs of "
    "training by nanoGPT, torchtitan, detectron2, mmengine, Megatron, DeepSpeed, transformers, "
    "ms-swift, litgpt, Lightning (bars or profiler) or with tqdm's bars; configs of torchtitan, "
    "accelerate, the Trainer, DeepSpeed and Lightning"
)
_PICKLE = b"\x80"
_BENCHMARKS = ("busbw", "# nThread ", "osu_allreduce", "Avg Latency(us)")
_CALLED: dict[Logged, str] = {
    "all_reduce": "all-reduces",
    "reduce_scatter": "reduce-scatters",
    "all_gather": "all-gathers",
}
_CSV = ("size_bytes", "time_us", "nodes", "gpus_per_node")
_MOST_SIZES = 6
_FEW_SIZES = 3


def recognise(path: Path) -> list[Learned]:
    """Read all that a file or folder says; raises ImportFailedError for other formats."""
    source = SourceFile(str(path), path)
    if is_of_traces(source):
        return [_traces(source)]
    if is_of_chakra(source):
        return [_chakra(source)]
    with foreign(source) as file:
        is_dump = file.read(len(_PICKLE)) == _PICKLE
    if is_dump:
        return [_dump(source.given, unpickled(source))]
    document = _document(source)
    if isinstance(document, dict):
        return [_of_json(source, document)]
    if config := _config_text(source):
        return [_config(source.given, config)]
    learned = [each for read in _readers(source) for each in read(source)]
    if not learned:
        raise ImportFailedError(source.given, f"is none of what can be imported: {FORMATS}")
    if all(each.tells_nothing for each in learned):
        lacks = "; ".join(f"{each.kind}: {each.facts[0]}" for each in learned)
        raise ImportFailedError(source.given, f"tells too little: {lacks}")
    return learned


def _document(source: SourceFile) -> Any:
    """A JSON document; None for other files, and for larger ones."""
    with foreign_text(source, FORMATS, of_many_programs=True) as file:
        text = file.read(LARGEST_TEXT + 1)
    if not text.strip():
        raise ImportFailedError(source.given, f"the file is empty; wanted {FORMATS}")
    try:
        return json_of(text) if len(text) <= LARGEST_TEXT else None
    except ValueError:
        return None


def _config_text(source: SourceFile) -> Config | None:
    with foreign_text(source, FORMATS, of_many_programs=True) as file:
        text = file.read(LARGEST_CONFIG + 1)
    return config_text(source.given, text)


def _config(name: str, config: Config) -> Learned:
    """What a config sets, and each key that is left out."""
    facts = [f"{path}: {_in_words(value)}" for path, value in config.settings.items()]
    facts += [f"not modelled: {each}" for each in config.not_modelled]
    if config.unknown:
        facts.append(f"not known here: {', '.join(config.unknown)}")
    return Learned(name, f"config of {config.program}", tuple(facts), config.keys)


def _in_words(value: Any) -> str:
    """Write a value as YAML does."""
    return str(value).lower() if isinstance(value, bool) else shown(value).strip("'")


def _of_json(source: SourceFile, document: dict[str, Any]) -> Learned:
    if is_dump(document):
        return _dump(source.given, document)
    if "log_history" in document:
        return _trainer(source.given, document)
    if config := config_of(source.given, document):
        return _config(source.given, config)
    for each in (*_logged(source), *_steps(source)):
        if not each.tells_nothing:
            return each
    if "traceEvents" not in document and "schema" not in document:
        return _collectives(source)
    raise ImportFailedError(source.given, f"is none of what can be imported: {FORMATS}")


def _traces(source: SourceFile) -> Learned:
    traces = read_rank_traces(source)
    job = traced_job(traces)
    keys = {name: each for name, each in job.document.items() if isinstance(each, dict)}
    steps = counted(len(traces.transfers), "common step")
    shown = [
        f"{len(traces.traces)} of {traces.world_size or 1} ranks, {steps}",
        f"a step takes {format_duration(traces.step_s)} under the profiler",
    ]
    shown += [
        f"an all-reduce of {format_bytes(size)} takes {format_duration(seconds)}"
        for size, seconds in list(traces.points.items())[-_MOST_SIZES:]
    ]
    if traces.straggler:
        rank, times = traces.straggler
        shown.append(f"rank {rank} computes {times:.2f} x as long as the others")
    kind = "traces of PyTorch's profiler"
    return Learned(source.given, kind, tuple(shown), keys, option="--traces", assumed=job.assumed)


def _dump(name: str, data: Any) -> Learned:
    if not is_dump(data):
        raise ImportFailedError(name, "is a pickle, but no dump of PyTorch's flight recorder")
    dump = flight_recorder(name, data)
    facts = _called(dump.all_reduces, dump.seconds)
    keys: dict[str, dict[str, Any]] = {"ddp": {"backend": dump.backend}}
    if dump.world_size:
        facts.insert(0, f"{counted(dump.world_size, 'rank')} of {dump.backend}")
        keys["cluster"] = {"nodes": 1, "gpus_per_node": dump.world_size}
    keys.setdefault("cluster", {}).update(nccl_key(dump.nccl))
    assumed = ("one node: a dump tells the ranks alone (cluster.nodes)",)
    return Learned(name, "dump of PyTorch's flight recorder", tuple(facts), keys, assumed=assumed)


def _called(calls: Mapping[int, int], seconds: Mapping[int, float]) -> list[str]:
    """How often all-reduces of the largest sizes were called, and their time if the file has it."""
    return [
        f"{count} x all-reduce of {format_bytes(size)}"
        + (f", {format_duration(seconds[size])} each" if size in seconds else "")
        for size, count in list(calls.items())[-_MOST_SIZES:]
    ]


def _chakra(source: SourceFile) -> Learned:
    steps = read_chakra(source)
    facts = [f"{counted(steps.nodes, 'node')}, {format_duration(steps.compute_s)} of compute"]
    facts += _called(steps.calls, steps.all_reduces)
    if steps.all_reduces:
        facts.append(f"for a cluster of its ranks: cluster.all_reduce: {source.given}")
    return Learned(source.given, "Chakra execution trace of one rank", tuple(facts))


def _trainer(name: str, document: dict[str, Any]) -> Learned:
    state = trainer_state(name, document)
    facts = [f"a step takes {format_duration(state.step_s)}, the whole run's mean"]
    if state.global_batch:
        facts.append(f"{state.global_batch} samples a step on all ranks")
    keys: dict[str, dict[str, Any]] = {}
    if state.batch_per_rank:
        keys["workload"] = {"batch_per_rank": state.batch_per_rank}
        facts.append(f"{state.batch_per_rank} samples a rank and micro-batch")
    return Learned(
        *(name, "trainer_state.json of transformers", tuple(facts), keys, state.step_s),
        global_batch=state.global_batch,
    )


def _ddp(name: str, logged: DdpLogging) -> Learned:
    ddp: dict[str, Any] = {}
    if logged.backend in ("nccl", "gloo"):
        ddp["backend"] = logged.backend
    if logged.cap_bytes and logged.cap_bytes != BUCKET_CAP_BYTES:
        ddp["bucket_cap_mb"] = logged.cap_bytes / MIB
    for key in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
        if getattr(logged, key):
            ddp[key] = True
    if not logged.broadcast_buffers:
        ddp["broadcast_buffers"] = False
    sizes = ", ".join(format_bytes(size) for size in logged.bucket_bytes[:_MOST_SIZES])
    facts = [f"{counted(len(logged.bucket_bytes), 'bucket')}: {sizes}"]
    if logged.parameters and logged.parameter_bytes:
        of = format_bytes(logged.parameter_bytes)
        facts.append(f"{counted(logged.parameters, 'parameter')} of {of}")
    times = (("forward", logged.forward_s), ("backward", logged.backward_s))
    facts += [f"{part} {format_duration(seconds)}" for part, seconds in times if seconds]
    if logged.comm_s:
        facts.append(
            f"from the first bucket sent to the last reduced {format_duration(logged.comm_s)}"
        )
    keys: dict[str, dict[str, Any]] = {"ddp": ddp}
    if logged.world_size:
        facts.insert(0, counted(logged.world_size, "rank"))
        keys["cluster"] = {"nodes": 1, "gpus_per_node": logged.world_size}
    assumed = ("one node: DDP logs the ranks alone (cluster.nodes)",) if logged.world_size else ()
    return Learned(name, "DDP's logging data", tuple(facts), keys, assumed=assumed)


def _collectives(source: SourceFile) -> Learned:
    """Read the first collective that a benchmark's file holds times of; else raise the refusal."""
    refused: OtherCollectiveError | None = None
    for operation in LOGS:
        try:
            return _logged_times(source, operation)
        except OtherCollectiveError as error:  # noqa: PERF203 -- of three, the first is said
            refused = refused or error
    raise refused or ImportFailedError(source.given, "holds no collective")


def _logged_times(source: SourceFile, operation: Logged) -> Learned:
    try:
        return _timed(read_all_reduce(source, operation=operation), operation)
    except NoLayoutError as error:
        if not error.ranks:
            raise
        layout = usual_layout(error.ranks)
        learned = _timed(read_all_reduce(source, operation=operation, layout=layout), operation)
        assumption = f"{layout[0]} x {layout[1]} ranks: the file tells their number alone"
        assumed = (*learned.assumed, f"{assumption} (cluster.nodes, gpus_per_node)")
        return replace(learned, assumed=assumed)


def _timed(log: AllReduceLog, operation: Logged) -> Learned:
    (least, least_s), (most, most_s) = log.samples[0], log.samples[-1]
    span = f"{format_bytes(least)} in {format_duration(least_s)} to {format_bytes(most)}"
    layout = ranks(log.nodes, log.gpus_per_node) + ("" if log.ranks_listed else " (not listed)")
    facts = [layout, f"{_CALLED[operation]} of {span} in {format_duration(most_s)}", *log.warnings]
    sizes = sum(size >= MIB for size, _ in log.samples)
    if sizes < _FEW_SIZES:
        more = counted(_FEW_SIZES - sizes, "more size")
        facts.append(f"{counted(sizes, 'size')} from 1 MiB up: needs {more} to tell a bandwidth")
    cluster: dict[str, Any] = {"nodes": log.nodes, "gpus_per_node": log.gpus_per_node}
    with suppress(ValueError):  # no preset
        cluster["device"] = catalog.resolve("device", log.gpus[0] if log.gpus else "")
    cluster[operation] = log.source
    keys = {"cluster": cluster}
    if operation != "all_reduce":  # links answer for other sizes
        return Learned(
            log.source, log.kind, tuple(facts), keys | {"ddp": {"strategy": "fully_shard"}}
        )
    keys["run"] = {"allow_extrapolation": True}
    beyond = "all-reduces of other sizes are extrapolated (run.allow_extrapolation)"
    return Learned(log.source, log.kind, tuple(facts), keys, assumed=(beyond,))


def _is_of_benchmark(text: str) -> bool:
    if any(word in text for word in _BENCHMARKS) or has_rows(text):
        return True
    named = [column for column in _CSV if column in text]
    return len(named) > 1 and header_of(text.splitlines(), _CSV) is not None


def _debug(source: SourceFile) -> Iterator[Learned]:
    log = debug_log(source.given, lines_of(source, FORMATS))
    if not log.connections and any(map(has_rows, parts_of(source, FORMATS))):
        return
    ways = dict.fromkeys("/".join(filter(None, (c.way, c.kind))) for c in log.connections)
    facts = [f"{counted(len(log.connections), 'connection')}: {', '.join(ways)}"]
    if not log.connections:
        facts = [f"{LACKS_CONNECTIONS}: needs the log from its beginning"]
    cluster: dict[str, Any] = dict(nccl_key(log.version))
    assumed: tuple[str, ...] = ()
    if log.layout:
        facts.insert(0, ranks(*log.layout))
        cluster |= {"nodes": log.layout[0], "gpus_per_node": log.layout[1]}
    elif log.ranks:
        nodes, gpus = usual_layout(log.ranks)
        cluster |= {"nodes": nodes, "gpus_per_node": gpus}
        facts.insert(0, f"some of {counted(log.ranks, 'rank')}")
        assumption = f"{nodes} x {gpus} ranks: not all ranks' lines are there, which tell the nodes"
        assumed = (f"{assumption} (cluster.nodes, gpus_per_node)",)
    if log.version:
        facts.append(f"NCCL {log.version}")
    if log.variables:
        cluster["nccl_env"] = dict(log.variables)
        facts.append("set: " + ", ".join(f"{k}={v}" for k, v in log.variables.items()))
    kind, keys = "log of NCCL_DEBUG=INFO", {"cluster": cluster}
    option = "--nccl-log" if log.connections else None
    is_bare = not (log.connections or log.ranks or log.version or log.variables)
    yield Learned(
        *(source.given, kind, tuple(facts), keys),
        option=option,
        assumed=assumed,
        tells_nothing=is_bare,
    )


def _steps(source: SourceFile) -> Iterator[Learned]:
    for each in step_lines(source.given, lines_of(source, FORMATS)):
        kind = f"step lines of {each.program}"
        if isinstance(each, TooLittle):
            yield Learned(source.given, kind, (each.lacks,), tells_nothing=True)
            continue
        keys: dict[str, dict[str, Any]] = {}
        assumed = each.assumed
        if each.program == "nanoGPT":
            keys["workload"] = {"model": "gpt2"}
            assumed = (*assumed, "the model: nanoGPT's default, gpt2 (workload.model)")
        if each.micro_batches > 1:
            keys["ddp"] = {"accumulation_steps": each.micro_batches}
        yield Learned(
            *(source.given, kind, each.facts, keys, each.step_s),
            assumed=assumed,
            global_batch=each.global_batch,
        )


def _logged(source: SourceFile) -> Iterator[Learned]:
    data = logged_data(lines_of(source, FORMATS))
    if data is not None:
        yield _ddp(source.given, ddp_logging(source.given, data))


# what reads a log, and whether something of it stands in a part of one
_OF_LOGS: tuple[tuple[Callable[[SourceFile], Iterator[Learned]], Callable[[str], bool]], ...] = (
    (_debug, lambda text: "NCCL INFO" in text),
    (lambda source: iter([_collectives(source)]), _is_of_benchmark),
    (_logged, lambda text: "bucket_sizes" in text),
    (_steps, has_marks),
)


def _readers(source: SourceFile) -> list[Callable[[SourceFile], Iterator[Learned]]]:
    """The readers whose marks stand in a log."""
    left, readers = dict(_OF_LOGS), []
    for part in parts_of(source, FORMATS):
        for read in [read for read, is_one in left.items() if is_one(part)]:
            readers.append(read)
            del left[read]
        if not left:
            break
    return [read for read, _ in _OF_LOGS if read in readers]
