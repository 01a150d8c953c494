"""Models under torch.compile: which gradients come at once, and in which order.

A compiled backward is one step to autograd, whose gradients are all there when it ends. For DDP
torch splits the graph where buckets fill, so that some come earlier.

Source: torch/_dynamo/backends/distributed.py (DDPOptimizer) and convert_frame.py, 2.13; for the
order torch/csrc/autograd/engine.cpp (ReadyQueue, which is libstdc++'s std::priority_queue).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.ddp.buckets import FIRST_BUCKET_BYTES, bucket_limits
from ddpsim.units import MIB
from ddpsim.workload.model import Model, Work, joined

_LATEST = 1  # autograd takes gradients to be added up before any other step
_EARLIER = 0

Operator = tuple[int, ...]  # parameters, by index, that one operator of the forward takes


def compiled_model(model: Model, ddp: Ddp) -> Model:
    """The model with the gradients of each compiled graph ready as its backward ends.

    Raises InputError where torch's split takes no such bucket cap.
    """
    graphs = tuple(chain.from_iterable(_graphs(part, model, ddp) for part in _parts(model)))
    return replace(
        model,
        ready_order=tuple(chain.from_iterable(_arrivals(model, graphs))),
        backward=(*_backward(model, graphs), Work(0.0)),
        provenance=(*model.provenance, _provenance(model, graphs, ddp)),
    )


def _operators(model: Model) -> Iterator[Operator]:
    """In backward order, told by names: the parameters of a module that come one after another."""
    names = {parameter.name for parameter in model.parameters}

    def place(index: int) -> str:
        module, _, _ = model.parameters[index].name.rpartition(".")
        attention, _, part = module.rpartition(".")
        if part == "out_proj" and f"{attention}.in_proj_weight" in names:
            return attention  # torch.nn.MultiheadAttention is one operator
        return module

    for _, members in groupby(model.ready_order, place):
        yield tuple(members)


def _parts(model: Model) -> Iterator[tuple[bool, tuple[Operator, ...]]]:
    """Operators that are compiled together, or not at all: the model, or each of its blocks."""
    if not model.compiled_blocks:
        yield True, tuple(_operators(model))
        return
    inner = tuple(f"{block}." for block in model.compiled_blocks)

    def block(operator: Operator) -> str:
        name = model.parameters[operator[0]].name
        return next((each for each in inner if name.startswith(each)), "")

    for name, operators in groupby(_operators(model), block):
        yield bool(name), tuple(operators)


def _graphs(
    part: tuple[bool, Sequence[Operator]], model: Model, ddp: Ddp
) -> Iterator[tuple[Operator, ...]]:
    """Split what Dynamo hands over, as DDPOptimizer does: where parameters reach the cap.

    The first one's is 1 MiB whatever the cap; of a list of caps the largest holds. Each gradient of
    what is not compiled comes on its own.
    """
    is_compiled, operators = part
    if not is_compiled:
        yield from (((index,),) for operator in operators for index in operator)
        return
    if not ddp.splits_graphs:
        yield tuple(operators)
        return
    cap_bytes = max(bucket_limits(ddp))
    if cap_bytes < FIRST_BUCKET_BYTES:
        raise InputError(
            "ddp.bucket_cap_mb",
            f"torch.compile stops at a cap below {FIRST_BUCKET_BYTES // MIB} MiB (DDPOptimizer: "
            "'First bucket should be smaller/equal'); give 1 or more, or set "
            "ddp.optimize_ddp: false",
        )
    limit_bytes, graph, size_bytes = FIRST_BUCKET_BYTES, list[Operator](), 0
    for operator in operators:
        graph.append(operator)
        size_bytes += sum(model.parameters[index].size_bytes for index in operator)
        if size_bytes >= limit_bytes:
            yield tuple(graph)
            limit_bytes, graph, size_bytes = cap_bytes, [], 0
    if graph:
        yield tuple(graph)


def _backward(model: Model, graphs: Sequence[Sequence[Operator]]) -> Iterator[Work]:
    """Each graph's work before its first gradient; the work after the last is the last graph's."""
    counts = [sum(map(len, graph)) for graph in graphs]
    ends = [*accumulate(counts[:-1], initial=0), len(model.backward)]
    for (begin, end), count in zip(pairwise(ends), counts, strict=True):
        yield joined(model.backward[begin:end])
        yield from [Work(0.0)] * (count - 1)


# --- gradients that come at once ---------------------------------------------------------------


class _Task(NamedTuple):
    """What waits in autograd's queue: a parameter's gradient, or None, the next graph."""

    priority: int
    parameter: int | None


def _arrivals(model: Model, graphs: Sequence[Sequence[Operator]]) -> Iterator[tuple[int, ...]]:
    """Each graph's parameters in the order in which DDP's hooks are called.

    A graph's backward hands autograd the gradient of its input, then those of its parameters, in
    the order in which the forward takes them. Approximation: where a residual enters the graph
    behind some of its parameters, so does its gradient, which changes the order of some.
    """

    def taken(index: int) -> tuple[bool, int]:
        """MultiheadAttention looks at its in_proj_bias first; all else as it is registered."""
        return not model.parameters[index].name.endswith("in_proj_bias"), index

    for position, graph in enumerate(graphs):
        used = chain.from_iterable(sorted(operator, key=taken) for operator in graph[::-1])
        earlier = [_Task(_EARLIER, None)] if position < len(graphs) - 1 else []
        tasks = [*earlier, *(_Task(_LATEST, index) for index in used)]
        yield tuple(task.parameter for task in _popped(tasks) if task.parameter is not None)


def _popped(tasks: Iterable[_Task]) -> Iterator[_Task]:
    """The tasks as std::priority_queue hands them out, those of one priority in its own order."""
    heap: list[_Task] = []
    for task in tasks:
        heap.append(task)
        _rise(heap, len(heap) - 1)
    while heap:
        yield heap[0]
        last = heap.pop()
        if heap:
            hole = _sink(heap)
            heap[hole] = last
            _rise(heap, hole)


def _rise(heap: list[_Task], place: int) -> None:
    """libstdc++'s __push_heap: past parents of a lower priority."""
    task = heap[place]
    while place and heap[(place - 1) // 2].priority < task.priority:
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = task


def _sink(heap: list[_Task]) -> int:
    """libstdc++'s __adjust_heap: the hole at the top moves down to a leaf, which is returned.

    Of two children of one priority the second moves up.
    """
    hole = 0
    while (second := 2 * hole + 2) < len(heap):
        child = second - 1 if heap[second].priority < heap[second - 1].priority else second
        heap[hole] = heap[child]
        hole = child
    if second == len(heap):
        heap[hole] = heap[second - 1]
        hole = second - 1
    return hole


def _provenance(model: Model, graphs: Sequence[object], ddp: Ddp) -> Provenance:
    if model.compiled_blocks:
        parts = ", each split as buckets fill" if ddp.splits_graphs else ""
        how = (
            f"{len(model.compiled_blocks)} blocks compiled on their own{parts} (torch 2.13): the "
            "gradients of each part come at once"
        )
    elif not ddp.splits_graphs:
        cause = "ddp.optimize_ddp: false" if ddp.is_ddp else f"ddp.strategy: {ddp.strategy}"
        how = f"one graph ({cause}): all gradients come at once, at its end"
    else:
        how = (
            f"DDPOptimizer splits the graph in {len(graphs)}, as buckets fill (torch 2.13): the "
            "gradients of each come at once"
        )
    return Provenance("torch.compile", how, "published")
