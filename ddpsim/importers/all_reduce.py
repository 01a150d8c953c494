"""Measured all-reduce times: logs of nccl-tests and of other benchmarks, and our CSV."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median

from ddpsim.importers.chakra import is_of_chakra, read_chakra
from ddpsim.importers.kineto.events import is_of_traces
from ddpsim.importers.kineto.ranks import read_rank_traces
from ddpsim.importers.measured import (
    FAR_APART,
    LEAST_BYTES,
    AllReduceLog,
    Bandwidths,
    Benchmark,
    Layout,
    Operation,
    bus_factor,
    named_layout,
    ranks_of,
)
from ddpsim.importers.nccl.tests_log import only_layout, read_json, read_text_log
from ddpsim.importers.text import (
    header_of,
    in_memory,
    lines_of,
    listed,
    read_text,
)
from ddpsim.scenario.quantity import SourceFile
from ddpsim.units import format_bytes_per_s, format_duration, parse_bytes

__all__ = ["AllReduceLog", "read_all_reduce"]
_FASTEST_BUSBW = 20e12  # bytes per second, assumed: NVLink 5 has 0.9e12 a direction
_OF_RCCL = re.compile(r"\s*(?:\[\s*\{|numCycle,)")  # -Z json and -Z csv
_CSV_COLUMNS = ("size_bytes", "time_us", "nodes", "gpus_per_node")
_MOST_BYTES = 4 * 10**8  # of a log whose table is read
_WANTED = "an nccl-tests log or our CSV"
_NAMED = 4  # sizes that a warning names
_NO_RANKS = "is a Chakra execution trace, which does not tell the number of ranks"
_OSU = re.compile(r"#\s*OSU\s+(?P<library>\S{1,40})\s{1,8}(?P<test>\S.{0,60}?)\s{1,8}Latency Test")
_LATENCIES = re.compile(r"#\s*Size\b.*Latency\s*\(us\)")
_LATENCY = re.compile(r"(?:^|[^\w\s.]|Z(?=\s))\s*(\d+)((?:\s+[\d.]+)+)\s*$")  # a label before it
_TESTS: dict[Operation, str] = {"all_reduce": "Allreduce", "broadcast": "Broadcast"}
_OSU_NO_RANKS = "is of the OSU micro-benchmarks, which do not print their ranks"
_BANDWIDTHS = re.compile(r"payload\s*\|\s*busbw\s*\|\s*algbw\b")
_TITLE = re.compile(r"bandwidth of (\w+) over (\d{1,7}) ranks")
_GPU = re.compile(r"hardware:\s{0,80}(?:.{0,300}?name='([^']{1,80})'|(\S.{0,80}?) node\b)")
_BANDWIDTH = re.compile(
    r"(?<![\w.])(\d{1,6})\s*([KMGT]iB)\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\b"
)
_NO_NODES = "does not say on how many nodes its ranks were"
_Matches = list[tuple[int, re.Match[str]]]


def read_all_reduce(
    source: SourceFile, *, layout: Layout | None = None, operation: Operation = "all_reduce"
) -> AllReduceLog:
    """Read a log, whichever of the known formats it has; raises ImportFailedError.

    `layout` is that of a file which does not list its ranks. `operation` says whose times to take.
    """
    file = Benchmark(source.given, operation, layout)
    return _whole(file, _of_jobs_traces(source, file) or _of_benchmark(source, file))


def _of_benchmark(source: SourceFile, file: Benchmark) -> AllReduceLog:
    stripped = (line.rstrip("\r\n") for line in lines_of(source, _WANTED))
    lines = in_memory(file.name, stripped, _MOST_BYTES)
    begin = "".join(islice((line for line in lines if line.strip()), 2))
    if not begin:
        raise file.wrong(f"the file is empty; wanted {_WANTED}")
    if _OF_RCCL.match(begin):
        what = "what rccl-tests writes with -Z; wanted what it prints on the screen"
        raise file.wrong(f"is {what}")
    if begin.lstrip().startswith("{"):
        return read_json(file, read_text(source, _WANTED))
    header = header_of(lines, _CSV_COLUMNS)
    if header is not None:
        return _read_csv(file, lines, header)
    if titles := _matches(_OSU, lines):
        return _read_osu(file, lines, titles)
    if headers := _matches(_BANDWIDTHS, lines):
        if len(headers) > 1:
            raise file.wrong("holds several tables; keep one a file", headers[1][0])
        return _read_bandwidths(file, lines)
    wanted = (
        "nccl-tests' table (size count type redop ... busbw), its JSON (-J), a table of "
        f"osu_allreduce or all_reduce_bench.py, or CSV ({','.join(_CSV_COLUMNS)})"
    )
    return read_text_log(file, lines, wanted)


def _of_jobs_traces(source: SourceFile, file: Benchmark) -> AllReduceLog | None:
    """The all-reduces of a training job; None for a file that is no trace.

    Each alone on the links, without waits for late ranks; of one rank with its waits.
    """
    if is_of_traces(source):
        traces = read_rank_traces(source)
        kind, points, lacks = "profiler's traces", traces.points, "whose size is recorded"
        ranks, is_one = traces.world_size or len(traces.traces), len(traces.traces) == 1
    elif is_of_chakra(source):
        points, lacks = read_chakra(source).all_reduces, "with a time"
        kind, ranks, is_one = "Chakra execution trace", 0, True
    else:
        return None
    if file.operation != "all_reduce":
        raise file.other(f"holds all-reduces alone, and no {file.operation}")
    if not points:
        raise file.wrong(f"holds no all-reduce {lacks}")
    stated = file.layout if ranks else file.layout_of(None, _NO_RANKS)
    nodes, gpus = stated or (1, ranks)
    if ranks and nodes * gpus != ranks:
        has = f"and the cluster has {nodes * gpus}"
        raise file.wrong(f"is of {ranks} ranks, {has}; name its own")
    waits = f"{file.name} is of one rank: its all-reduces hold the waits for the others"
    return AllReduceLog(
        *(file.name, kind, nodes, gpus, tuple(points.items())),
        warnings=(waits,) if is_one and ranks != 1 else (),
        ranks_listed=bool(ranks),
    )


def _read_csv(file: Benchmark, lines: list[str], header: int) -> AllReduceLog:
    if file.operation != "all_reduce":
        raise file.other(f"holds all-reduces alone (CSV), and no {file.operation}")
    samples, layouts = [], set()
    for line, row in file.table(lines[header:], _CSV_COLUMNS, header + 1):
        size, nodes, gpus = (
            file.whole(line, row[key], key) for key in ("size_bytes", "nodes", "gpus_per_node")
        )
        time_us = file.number(line, row["time_us"], "time_us", above_zero=True)
        samples.append((size, time_us * 1e-6))
        layouts.add((nodes, gpus))
    layout = only_layout(file, layouts)
    return AllReduceLog(file.name, "all-reduce CSV", *layout, tuple(samples))


def _by_size(samples: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    times: dict[int, list[float]] = defaultdict(list)
    for size, time_s in samples:
        times[size].append(time_s)
    return tuple((size, median(times[size])) for size in sorted(times))


def _whole(file: Benchmark, log: AllReduceLog) -> AllReduceLog:
    """A log with one time a size, and a warning of sizes whose two times differ."""
    ranks = log.world_size
    for size, time_s in log.samples:  # of another unit, or of something else
        busbw = bus_factor(file.operation, ranks) * size / time_s
        if size >= LEAST_BYTES and busbw > _FASTEST_BUSBW:
            raise file.wrong(
                f"says that {size} bytes took {time_s * 1e6:g} us on {ranks} ranks, which no link "
                f"can reach (a bus bandwidth of {format_bytes_per_s(busbw)} a rank); is the time "
                "in microseconds?",
            )
    log = replace(log, samples=_by_size(log.samples), out_of_place=_by_size(log.out_of_place))
    return replace(log, warnings=(*log.warnings, *_warnings_of_spread(log)))


def _warnings_of_spread(log: AllReduceLog) -> tuple[str, ...]:
    """A warning of the sizes whose two times differ: the network or the GPUs were not quiet."""
    sizes = log.apart
    if not sizes:
        return ()
    in_place, out_of_place = dict(log.samples), dict(log.out_of_place)
    each = [
        f"{size} B ({format_duration(in_place[size])} and {format_duration(out_of_place[size])})"
        for size in sizes[:_NAMED]
    ]
    named = ", ".join(each) + (", ..." if len(sizes) > _NAMED else "")
    differ = f"times in place and out of place differ by more than {FAR_APART:g} x"
    again = "measure again with nothing else running, and with more iterations (-w 20 -n 100)"
    at = f"{len(sizes)} of {len(log.samples)} sizes: {named}"
    return (f"{log.source}: {differ} at {at}; {again}",)


def _matches(wanted: re.Pattern[str], lines: Iterable[str]) -> _Matches:
    """Lines that hold it, by their numbers."""
    return [(i, match) for i, line in enumerate(lines, 1) if (match := wanted.search(line))]


def _read_osu(file: Benchmark, lines: Sequence[str], titles: _Matches) -> AllReduceLog:
    """Average latencies, the first column below a title and a header."""
    if file.operation not in _TESTS:  # whose sizes are those of one rank's part
        raise file.other(f"is of OSU, of which {file.operation} is not read")
    wanted = _TESTS[file.operation]
    of_it = [(i, title) for i, title in titles if title["test"] == wanted]
    if not of_it:
        line, title = titles[0]
        raise file.other(f"is of OSU's {title['test']} test; wanted its {wanted} test", line)
    if len(of_it) > 1:
        several = f"{len(of_it)} tables of OSU's {wanted} test"
        raise file.wrong(f"holds {several}; keep one a file", of_it[1][0])
    first, title = of_it[0]
    end = min((i for i, _ in titles if i > first), default=len(lines) + 1)
    begins = next((i for i, _ in _matches(_LATENCIES, lines[: end - 1]) if i > first), end)
    samples = tuple(
        (size, file.number(i, row[2].split()[0], "latency", above_zero=True) * 1e-6)
        for i, row in _matches(_LATENCY, lines[: end - 1])
        if i >= begins and (size := int(file.number(i, row[1], "size")))
    )
    if not samples:
        raise file.wrong("this table of the OSU micro-benchmarks has no row", first)
    others = [f"OSU's {title['test']} test (line {i})" for i, title in titles if i != first]
    only = f"{file.name}: {file.operation} is read; the file also holds {', '.join(others)}"
    # MPI's title names a device's library, such as MPI-CUDA, where buffers may lie on the GPU
    library = title["library"].partition("-")[0]
    times = f"{file.name}: OSU times {library}'s collectives, out of place"
    times += " and in the host's memory" if title["library"] == "MPI" else ""
    return AllReduceLog(
        *(file.name, "OSU table", *file.layout_of(None, _OSU_NO_RANKS, first), samples),
        warnings=(*([only] if others else []), f"{times}; DDP reduces in place on the GPU"),
        ranks_listed=False,
    )


def _read_bandwidths(file: Benchmark, lines: Sequence[str]) -> AllReduceLog:
    if file.operation != "all_reduce":
        raise file.wrong(f"holds all-reduces alone (all_reduce_bench.py), no {file.operation}")
    titles = _matches(_TITLE, lines)
    for line, title in titles:
        if title[1] != "all_reduce":
            raise file.other(f"is of {title[1]}; wanted a table of all_reduce", line)
    rows: list[tuple[int, Bandwidths, float]] = []
    left_out = []
    for i, row in _matches(_BANDWIDTH, lines):
        algbw = file.number(i, row[4], "algbw")
        file.number(i, row[3], "busbw")
        if algbw:
            size = int(parse_bytes(f"{row[1]} {row[2]}"))
            rows.append((size, Bandwidths(row[4], row[3], i), algbw))
        else:
            left_out.append(i)
    if not rows:
        raise file.wrong("holds no row with a bandwidth below payload, busbw, algbw")
    ranks = int(titles[0][1][2]) if titles else ranks_of(row for _, row, _ in rows)
    layout = file.layout_of(ranks, _NO_NODES, titles[0][0] if titles else 0)
    for _, bandwidths, _ in rows:
        called = f"of layout {named_layout(layout)}"
        file.check_bus_factor(bandwidths, layout[0] * layout[1], called)
    none = f"{file.name}: rows whose algbw is printed as 0 are left out: lines {listed(left_out)}"
    return AllReduceLog(
        *(file.name, "all_reduce_bench.py table", *layout),
        tuple((size, size / (algbw * 1e9)) for size, _, algbw in rows),
        tuple(sorted({gpu[1] or gpu[2] for _, gpu in _matches(_GPU, lines)})),
        (none,) if left_out else (),
        ranks_listed=False,
    )
