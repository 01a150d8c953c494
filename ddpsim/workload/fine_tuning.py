"""A captured model as it is fine-tuned: layers that are frozen, and LoRA's adapters beside them.

The table and the step that come out are those that a capture of the fine-tuned model has: frozen
parameters apart, no product for their gradients, and nothing behind the last gradient.
Source of the adapters' operators: peft 0.17 tuners/lora/layer.py, `base(x) + B(A(x)) * scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from ddpsim.errors import InputError, shown
from ddpsim.scenario.workload import Workload
from ddpsim.workload.operators import Operator, moving, product
from ddpsim.workload.zoo.step import Row, Step
from ddpsim.workload.zoo.table import ListedParameter, columns_of, listed

_BITS = {"int8": 8, "nf4": 4}
_IN_BLOCK, _IN_SECOND = 64, 256  # weights of a scale of nf4, and scales of a scale (QLoRA)
_WRITTEN = {"Linear": (0, 1), "Conv1D": (1, 0)}  # places of outputs and inputs in a weight's shape
_Document = dict[str, Any]


def fine_tuned(table: _Document, step: Step, workload: Workload) -> tuple[_Document, Step]:
    """The table and the step with what is frozen, and with adapters; raises InputError."""
    if not workload.lora and not workload.frozen:
        return table, step
    siblings = tuple(_siblings(table, step))
    if workload.lora:
        table, step, frozen = _adapted(table, step, workload, siblings)
    else:
        frozen = _named(table, workload.frozen)
    step = _freed(table, step, frozen, siblings)
    document, step = _without_gradients(table, step, frozen)
    if workload.lora and workload.lora.base:
        document["frozen"] = _stored(table, document["frozen"], _BITS[workload.lora.base])
    return document, step


def quantized_state_bytes(table: _Document, workload: Workload) -> int:
    """Bytes of the scales of a base in 8 or 4 bits, which each rank has whole.

    A float32 a row of int8; of nf4 a byte for 64 weights, and a float32 for 256 of those.
    """
    if not workload.lora or not workload.lora.base:
        return 0
    layers = _inner(table)
    if workload.lora.base == "int8":
        return sum(4 * one.outputs for one in layers)
    scales = sum(one.outputs * one.inputs // _IN_BLOCK for one in layers)
    return scales + 4 * (scales // _IN_SECOND)


def _stored(table: _Document, columns: _Document, bits: int) -> _Document:
    """Frozen parameters, those of linear layers in so many bits as elements of two bytes."""
    numel = {f"{one.module}.weight": one.outputs * one.inputs for one in _inner(table)}
    each = zip(columns["name"], columns["shape"], strict=True)
    shapes = [[numel[name] * bits // 16] if name in numel else shape for name, shape in each]
    return columns | {"shape": shapes}


def _named(table: _Document, modules: Sequence[str]) -> frozenset[int]:
    """Places of the parameters of some modules; raises InputError for a name of none."""
    names, places = table["parameters"]["name"], set[int]()
    for module in modules:
        inside = {i for i, name in enumerate(names) if f"{name}.".startswith(f"{module}.")}
        if not inside:
            reason = f"{shown(module)} holds no trained parameter of {table['name']}"
            raise InputError("workload.frozen", reason)
        places |= inside
    if len(places) == len(names):
        raise InputError("workload.frozen", "leaves nothing that is trained; name fewer modules")
    return frozenset(places)


class _Linear(NamedTuple):
    """A linear layer: its module, its weight's place, and extents."""

    module: str
    place: int
    outputs: int
    inputs: int

    def is_forward(self, one: Operator) -> bool:
        """Whether an operator is its product."""
        return one.kind == "product" and (one.n, one.k) == (self.outputs, self.inputs)

    def is_backward(self, one: Operator) -> bool:
        """Whether an operator is the product of its input's gradient, or of its weight's."""
        weight = {one.m, one.n} == {self.outputs, self.inputs}
        of_input = (one.n, one.k) == (self.inputs, self.outputs)
        return one.kind == "product" and one.count == 1 and (weight or of_input)


def _linears(table: _Document) -> list[_Linear]:
    """In the order in which they are called."""
    layers = {}
    for place, one in enumerate(listed(table["parameters"])):
        if one.module in _WRITTEN and one.name.endswith(".weight"):
            outputs, inputs = (one.shape[i] for i in _WRITTEN[one.module])
            layers[one.owner] = _Linear(one.owner, place, outputs, inputs)
    return [layers[module] for module in table["forward_modules"] if module in layers]


def _inner(table: _Document) -> list[_Linear]:
    """All linear layers but the head: the last one, unless that is in a block."""
    linears = _linears(table)
    inside = tuple(f"{block}." for block in table["blocks"])
    has_head = bool(linears) and not linears[-1].module.startswith(inside)
    return linears[:-1] if has_head else linears


def _siblings(table: _Document, step: Step) -> Iterator[tuple[str, ...]]:
    """Linear layers by their inputs: such as are called in a row, with no operator between."""
    layers = {one.module: one for one in _linears(table)}
    group: list[str] = []
    is_open = False
    for module, row in zip(table["forward_modules"], step.forward, strict=True):
        layer = layers.get(module)
        products = layer and sum(map(layer.is_forward, row))
        alike = layer is not None and is_open and layers[group[-1]].inputs == layer.inputs
        if group and not (alike and products):
            yield tuple(group)
            group = []
        group += [module] if layer and products else []
        is_open = bool(products) and all(one.kind in ("copy", "product") for one in row)
    if group:
        yield tuple(group)


def _chosen(table: _Document, ends: Sequence[str] | None) -> list[_Linear]:
    """The layers that get adapters; raises InputError for a name of none."""
    linears = _linears(table)
    if ends is None:
        linears = _inner(table)
        ends = [one.module for one in linears]
    for end in ends:
        if not any(f".{one.module}".endswith(f".{end}") for one in linears):
            reason = f"no linear layer of {table['name']} has a name that ends in {shown(end)}"
            raise InputError("workload.lora.modules", reason)
    if not linears:
        raise InputError("workload.lora", f"{table['name']} has no linear layers to adapt; drop it")
    return [one for one in linears if any(f".{one.module}".endswith(f".{end}") for end in ends)]


@dataclass(frozen=True)
class _Adapter:
    """One layer's A and B over so many tokens.

    `casts`: autocast takes weights to half; `casts_input`: what the layer is called with too.
    """

    layer: _Linear
    rank: int
    tokens: float
    item_bytes: float
    casts: bool
    casts_input: bool

    @property
    def kept_bytes(self) -> float:
        """What autograd keeps of it: the input of B, and casts."""
        layer, cast = self.layer, 0.0
        if self.casts:
            cast = 2 * (self.casts_input * self.tokens * layer.inputs + self._weights)
        return self.tokens * self.rank * self.item_bytes + cast

    @property
    def _weights(self) -> int:
        return self.rank * (self.layer.inputs + self.layer.outputs)

    def parameters(self, dtype: str) -> Iterator[ListedParameter]:
        """A, then B."""
        shapes = {"A": [self.rank, self.layer.inputs], "B": [self.layer.outputs, self.rank]}
        for key, shape in shapes.items():
            name = f"{self.layer.module}.lora_{key}.default.weight"
            yield ListedParameter(name, shape, "Linear", dtype, is_sparse=False)

    def forward(self) -> Iterator[Operator]:
        """Both products, the scaling, and the sum with the layer's output."""
        layer, item = self.layer, self.item_bytes
        if self.casts_input:
            yield _cast(self.tokens * layer.inputs, 4, 2)
        if self.casts:
            yield _cast(self.rank * layer.inputs, 4, 2)
        yield product(self.tokens, self.rank, layer.inputs, item)
        if self.casts:
            yield _cast(self.rank * layer.outputs, 4, 2)
        yield product(self.tokens, layer.outputs, self.rank, item)
        yield _pointwise(self.tokens * layer.outputs, 1, item)
        yield _pointwise(self.tokens * layer.outputs, 2, item)

    def backward(self, *, first: bool) -> tuple[Row, Row, Row]:
        """What ends with the gradient of B, with that of A, and what follows the layer's own.

        `first`: no gradient of the layer's input is wanted, nor one of A's.
        """
        layer, rank, tokens, item = self.layer, self.rank, self.tokens, self.item_bytes
        outer = (
            _pointwise(tokens * layer.outputs, 1, item),
            product(layer.outputs, rank, tokens, item),
            product(tokens, rank, layer.outputs, item),
            *self._cast_back(rank * layer.outputs),
        )
        inner = (
            product(rank, layer.inputs, tokens, item),
            *([] if first else [product(tokens, layer.inputs, rank, item)]),
            *self._cast_back(rank * layer.inputs),
        )
        elements = tokens * layer.inputs
        cast = self._cast_back(elements) if self.casts_input else ()
        sum_ = _pointwise(elements, 2, 4 if cast else item)
        return outer, inner, (*cast, sum_)

    def _cast_back(self, elements: float) -> Row:
        return (_cast(elements, 2, 4),) if self.casts else ()


def _pointwise(elements: float, read: int, item_bytes: float) -> Operator:
    return moving("pointwise", elements * read * item_bytes, elements * item_bytes, item_bytes)


def _cast(elements: float, read: float, written: float) -> Operator:
    return moving("copy", elements * read, elements * written, max(read, written))


def _adapted(
    table: _Document, step: Step, workload: Workload, siblings: Sequence[tuple[str, ...]]
) -> tuple[_Document, Step, frozenset[int]]:
    """With adapters, and the places of all else."""
    lora = workload.lora
    if lora is None:
        raise ValueError("this workload has no adapters")
    casts = workload.precision.startswith("amp")
    adapters = {}
    for layer in _chosen(table, lora.modules):
        row = step.forward[table["forward_modules"].index(layer.module)]
        one = next((one for one in row if layer.is_forward(one)), None)
        if one is None:
            reason = f"the product of {layer.module} is not found in {table['name']}: drop it"
            raise InputError("workload.lora.modules", reason)
        narrow = any(_narrows(each, one.m * one.k) for each in row)
        extents = lora.rank, one.m, one.item_bytes, casts, narrow
        adapters[layer.module] = _Adapter(layer, *extents)
    if lora.base:
        step = _dequantized(table, step, _BITS[lora.base])
    step = _with_forwards(table, step, adapters)
    firsts = next(group for group in siblings if {*group} & {*adapters})
    return _with_backwards(table, step, adapters, firsts)


def _dequantized(table: _Document, step: Step, bits: int) -> Step:
    """With casts to two bytes before each product of a layer that is stored in so many bits."""
    layers = {one.module: one for one in _inner(table)}

    def whole(row: Row, layer: _Linear) -> Row:
        """Cast before its own products, once."""
        elements = layer.outputs * layer.inputs
        first = next((i for i, one in enumerate(row) if _is_of(layer, one)), None)
        if first is None:
            return row
        return (*row[:first], _cast(elements, bits / 8, 2), *row[first:])

    def _is_of(layer: _Linear, one: Operator) -> bool:
        return layer.is_forward(one) or layer.is_backward(one)

    forward = list(step.forward)
    for i, module in enumerate(table["forward_modules"]):
        if module in layers:
            forward[i] = whole(forward[i], layers[module])
    backward = list(step.backward)
    for one in layers.values():
        row = _first_row(table, step, one)
        if row is not None:
            backward[row] = whole(backward[row], one)
    return step._replace(forward=tuple(forward), backward=tuple(backward))


def _first_row(table: _Document, step: Step, layer: _Linear) -> int | None:
    """The row of the backward that has a layer's own products."""
    names, prefix = table["parameters"]["name"], f"{layer.module}."
    return next(
        (
            row
            for row, place in enumerate(table["ready_order"])
            if names[place].startswith(prefix) and any(map(layer.is_backward, step.backward[row]))
        ),
        None,
    )


def _with_forwards(table: _Document, step: Step, adapters: dict[str, _Adapter]) -> Step:
    modules = table["forward_modules"]

    def adapted(row: Row, module: str) -> Row:
        if module not in adapters:
            return row
        adapter = adapters[module]
        last = [i for i, one in enumerate(row) if adapter.layer.is_forward(one)]
        if not last:
            return row
        return (*row[: last[0] + 1], *adapter.forward(), *row[last[0] + 1 :])

    blocks = [f"{block}." for block in table["blocks"]]
    kept = [
        sum(a.kept_bytes for module, a in adapters.items() if module.startswith(block))
        for block in blocks
    ]
    whole = sum(one.kept_bytes for one in adapters.values())
    outside = whole - sum(kept)
    return step._replace(
        forward=tuple(map(adapted, step.forward, modules)),
        reruns=tuple((i, adapted(row, modules[i]) if row else row) for i, row in step.reruns),
        saved_bytes=step.saved_bytes + whole,
        own_bytes=tuple(map(sum, zip(step.own_bytes, kept, strict=True))),
        others_bytes=tuple(each + outside for each in step.others_bytes),
    )


def _with_backwards(
    table: _Document, step: Step, adapters: dict[str, _Adapter], firsts: Sequence[str]
) -> tuple[_Document, Step, frozenset[int]]:
    """With rows for the adapters' gradients, and with their parameters after a layer's own.

    `firsts`: layers whose input needs no gradient.
    """
    parameters, moved = list[ListedParameter](), list[int]()
    places = dict[str, tuple[int, int]]()
    for owner, owned in groupby(listed(table["parameters"]), lambda one: one.owner):
        for one in owned:
            moved.append(len(parameters))
            parameters.append(one)
        if owner in adapters:
            places[owner] = len(parameters) + 1, len(parameters)
            parameters += adapters[owner].parameters(one.dtype)
    ready, rows = list[int](), list[Row]()
    layers = (one for one in _linears(table) if one.module in {*adapters, *firsts})
    begun = {_first_row(table, step, one): one for one in layers}
    for row, place in enumerate(table["ready_order"]):
        rest = step.backward[row]
        if row in begun:
            layer = begun[row]
            begins, is_first = _begins(rest, layer), layer.module in firsts
            before, rest = rest[:begins], () if is_first else rest[begins:]
            if adapter := adapters.get(layer.module):
                outer, inner, after = adapter.backward(first=is_first)
                rows += [(*before, *outer), inner]
                ready += places[layer.module]
                rest = rest if is_first else (*rest, *after)
            else:
                rest = (*before, *rest)
        rows.append(rest)
        ready.append(moved[place])
    columns = columns_of(parameters, table["parameters"])
    everything = dict(table, parameters=columns, ready_order=ready)
    rows.append(step.backward[-1])
    return everything, step._replace(backward=tuple(rows)), frozenset(moved)


def _begins(row: Row, layer: _Linear) -> int:
    """The place of a layer's first operator: a product, or the cast of its weight."""
    first = next(i for i, one in enumerate(row) if layer.is_backward(one))
    elements = layer.outputs * layer.inputs
    before = row[first - 1] if first else None
    is_cast = before is not None and before.kind == "copy" and before.bytes_read < elements * 2
    return first - (is_cast and before is not None and before.bytes_written == elements * 2)


def _without_gradients(
    table: _Document, step: Step, frozen: frozenset[int]
) -> tuple[_Document, Step]:
    """With parameters frozen: what is left of their rows is of the next gradient's."""
    rows = _Rows(table, step)
    for place in sorted(frozen):
        rows.freeze(place)
    step = _kept_less(table, step, rows.unkept)
    ready, backward, open_row = list[int](), list[Row](), list[Operator]()
    for row, place in enumerate(table["ready_order"]):
        open_row += rows.backward[row]
        if place not in frozen:
            ready.append(place)
            backward.append(tuple(open_row))
            open_row = []
    if not ready:
        raise InputError("workload.frozen", "leaves no gradient; name fewer modules")
    parameters = dict(enumerate(listed(table["parameters"])))
    taken = {place: parameters.pop(place) for place in sorted(frozen)}
    number = {place: i for i, place in enumerate(parameters)}
    document = dict(
        table,
        parameters=columns_of([*parameters.values()], table["parameters"]),
        frozen=_frozen_columns(table, taken),
        ready_order=[number[place] for place in ready],
    )
    return document, _kept_alone(document, step._replace(backward=(*backward, ())))


def _kept_less(table: _Document, step: Step, unkept: Sequence[tuple[str, float]]) -> Step:
    """With fewer bytes kept of some modules."""
    in_blocks, others, saved = list(step.own_bytes), list(step.others_bytes), step.saved_bytes
    for module, size_bytes in unkept:
        saved -= size_bytes
        inside = (i for i, block in enumerate(table["blocks"]) if module.startswith(f"{block}."))
        if (block := next(inside, None)) is not None:
            in_blocks[block] -= size_bytes
        elif others:
            others[-1] -= size_bytes
    return step._replace(own_bytes=tuple(in_blocks), others_bytes=tuple(others), saved_bytes=saved)


def _freed(
    table: _Document, step: Step, frozen: frozenset[int], siblings: Sequence[tuple[str, ...]]
) -> Step:
    """Without inputs of frozen linear layers, where nothing else keeps them.

    Those are what a norm makes, or a product of two factors, and casts of a layer's own: another
    operator may keep its output for itself.
    """
    names, modules = table["parameters"]["name"], table["forward_modules"]
    layers = {one.module: one for one in _linears(table)}
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    unkept = []
    for group in siblings:
        is_unkept = all(layers[one].place in frozen for one in group) and not {*group} & adapted
        is_unkept = is_unkept and _is_unkept(table, step, layers[group[0]])
        for module in group:
            row = step.forward[modules.index(module)]
            one = next(filter(layers[module].is_forward, row))
            is_cast = any(_narrows(each, one.m * one.k) for each in row[: row.index(one)])
            is_cast_alone = is_cast and layers[module].place in frozen
            if is_cast_alone or (is_unkept and module == group[0]):
                unkept.append((module, one.m * one.k * one.item_bytes))
    return _kept_less(table, step, unkept)


def _narrows(one: Operator, elements: float) -> bool:
    return one.kind == "copy" and (one.bytes_read, one.bytes_written) == (
        4 * elements,
        2 * elements,
    )


def _is_unkept(table: _Document, step: Step, layer: _Linear) -> bool:
    """Whether what makes a layer's input does not keep it."""
    names, shapes = table["parameters"]["name"], table["parameters"]["shape"]
    row = table["forward_modules"].index(layer.module)
    before = f"{table['forward_modules'][row - 1]}." if row else "."
    owned = [shape for name, shape in zip(names, shapes, strict=True) if name.startswith(before)]
    is_made_there = not any(one.kind != "copy" for one in step.forward[row][:-1][:1])
    if owned and all(len(shape) == 1 for shape in owned):
        last = step.forward[row - 1][-1]
        return is_made_there and last.kind in ("pointwise", "normalization")
    begun = _first_row(table, step, layer)
    after = step.backward[begun + 1][:2] if begun is not None else ()
    return len(after) > 1 and all(
        one.kind == "pointwise" and one.bytes_read == 2 * one.bytes_written for one in after
    )


def _kept_alone(table: _Document, step: Step) -> Step:
    """Without what blocks keep that no gradient reaches: those ahead of all that is trained."""
    names, modules = table["parameters"]["name"], table["forward_modules"]
    owners = {name.rpartition(".")[0].partition(".lora_")[0] for name in names}
    first = next((i for i, module in enumerate(modules) if module in owners), 0)
    reached = set(modules[first:])
    in_blocks = tuple(
        kept if any(module.startswith(f"{block}.") for module in reached) else 0.0
        for kept, block in zip(step.own_bytes, table["blocks"], strict=True)
    )
    gone = sum(step.own_bytes) - sum(in_blocks)
    return step._replace(own_bytes=in_blocks, saved_bytes=step.saved_bytes - gone)


def _frozen_columns(table: _Document, frozen: Mapping[int, ListedParameter]) -> _Document:
    """Columns of the table's own frozen parameters and of these, with their places among all."""
    old = table.get("frozen")
    rows = list(zip(old["place"], listed(old), strict=True)) if old else []
    taken = {place for place, _ in rows}
    among = [i for i in range(len(table["parameters"]["name"]) + len(taken)) if i not in taken]
    rows += [(among[place], one) for place, one in frozen.items()]
    each = [(one.name, one.shape, one.dtype, place) for place, one in sorted(rows)]
    return dict(
        zip(("name", "shape", "dtype", "place"), map(list, zip(*each, strict=True)), strict=True)
    )


class _Rows:
    """Rows of the backward, from which what makes gradients is taken."""

    def __init__(self, table: _Document, step: Step) -> None:
        self._columns = table["parameters"]
        self.backward = [list(row) for row in step.backward]
        names = self._columns["name"]
        self._of: dict[str, list[int]] = {}
        self.unkept: list[tuple[str, float]] = []
        for row, place in enumerate(table["ready_order"]):
            self._of.setdefault(names[place].rpartition(".")[0], []).append(row)
        self._ties = any(
            module and module not in {name.rpartition(".")[0] for name in names}
            for module in table["forward_modules"]
        )

    def freeze(self, place: int) -> None:
        """Take what makes one parameter's gradient, and a cast of it."""
        shape = self._columns["shape"][place]
        numel, module = prod(shape), self._columns["name"][place].rpartition(".")[0]
        rows = self._of.get(module, [])
        is_embedding = self._columns["module"][place] == "Embedding"
        if is_embedding:
            self._take(rows, lambda one: one.kind == "embedding_backward", numel, "")
            rows = list(range(len(self.backward))) if self._ties else []
        if len(shape) > 1:
            self._take(rows, lambda one: _makes(one, shape), numel, "")
        else:
            self._take(rows, lambda one: _sums(one, numel), numel, module)

    def _take(
        self, rows: Sequence[int], makes: Callable[[Operator], bool], numel: int, scale_of: str
    ) -> None:
        """The first that `makes` a gradient; `scale_of`: the module whose scale it may be."""
        for row in rows:
            ops = self.backward[row]
            first = next((i for i, one in enumerate(ops) if makes(one)), None)
            if first is None:
                continue
            last = next((i for i in range(first + 1, len(ops)) if _returns(ops[i], numel)), None)
            taken = {first, last}
            if scale_of and first and ops[first - 1].kind == "pointwise":
                taken.add(first - 1)  # a norm's scale: its gradient times what was normalised
                self.unkept.append((scale_of, ops[first - 1].bytes_written))
            self.backward[row] = [one for i, one in enumerate(ops) if i not in taken]
            return


def _makes(one: Operator, shape: Sequence[int]) -> bool:
    """Whether it makes the gradient of a weight of a shape."""
    if one.kind == "convolution_weight_gradient":
        return True
    return one.kind == "product" and one.count * one.m * one.n == prod(shape)


def _sums(one: Operator, numel: int) -> bool:
    """Whether it makes the gradient of a vector."""
    return one.kind == "reduction" and one.bytes_written in (2 * numel, 4 * numel)


def _returns(one: Operator, numel: int) -> bool:
    """Whether it casts a gradient to its parameter's type, under autocast."""
    return one.kind == "copy" and (one.bytes_read, one.bytes_written) == (2 * numel, 4 * numel)
