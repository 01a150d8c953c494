"""A captured model's step on a device that nobody measured, operator by operator.

Each operator takes the device what `ddpsim.workload.zoo.law` says, and the host its time for the
operator and for what it launches; compiled code has no operators. Attention that is written out
takes the place of the fused one that was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic, arithmetic_of, other_left
from ddpsim.workload.checkpointing import (
    KeptBytes,
    budgeted,
    checkpointed,
    reruns_of,
    with_budget,
    with_reruns,
)
from ddpsim.workload.fine_tuning import fine_tuned, quantized_state_bytes
from ddpsim.workload.float8 import Float8Linears
from ddpsim.workload.model import Model, Parameter, Work, joined
from ddpsim.workload.optimizer import optimizer_work
from ddpsim.workload.zoo.law import Law, written_out
from ddpsim.workload.zoo.step import Row, Step, outputs_of, step_of
from ddpsim.workload.zoo.table import (
    batch_norms_of,
    check_options,
    input_size_of,
    is_convolutional,
    is_recurrent,
    read_buffers,
    read_parameters,
)


def zoo_model(
    table: dict[str, Any],
    workload: Workload,
    device: Device,
    *,
    half_weights: bool = False,
    knows_outputs: bool = False,
    gathers_frozen: bool = False,
) -> Model:
    """A captured model (schema `ddpsim.model/3`) on a device; raises InputError.

    `half_weights`: they are half already where the model is called: see `step_of`.
    `knows_outputs`: with what each work of the forward hands on. `gathers_frozen`: parameters that
    are not trained are shared out with the others, as sharded modules have them.
    """
    arithmetic = arithmetic_of(workload.precision, device)
    if half_weights:
        arithmetic = replace(arithmetic, casts=False)
    batch, x = workload.batch_per_rank, input_size_of(table, workload)
    check_options(table, workload)
    captured = step_of(table, workload.precision, batch, x, half_weights=half_weights)
    state_bytes = quantized_state_bytes(table, workload)
    table, step = fine_tuned(table, captured, workload)
    output_layer = table["forward_modules"][-1] if table["forward_modules"] else None
    parameters = read_parameters(table["parameters"], workload.precision, output_layer)
    outputs, flops = tuple(outputs_of(step.forward)), sum(one.flops for r in step.rows for one in r)
    linears = _float8_linears(table, workload, device)
    if linears:
        step = linears.converted(step, table["forward_modules"])
    by_rows = _scores_bytes(step, arithmetic) if workload.attention == "eager" else None
    if by_rows:
        step = step.rewritten(lambda one: written_out(one, arithmetic.softmax_bytes))
    kept = KeptBytes(table, step, by_rows or [0.0] * len(step.forward))
    blocks = _compiled_blocks(table, workload)
    priced = _Prices.of(table, workload, device, arithmetic, step)
    forward = priced.works(step.forward, table["forward_modules"], blocks)
    owners = [table["parameters"]["name"][index] for index in table["ready_order"]]
    backward = priced.works(step.backward, [*owners, ""], blocks)
    forward, backward, activation_bytes = _checkpointed(
        *(table, workload, step, kept), (forward, backward), priced.inside.work
    )
    frozen = _Frozen.of(table, workload)
    held, ready_order = parameters, tuple(table["ready_order"])
    if gathers_frozen:
        held, ready_order = frozen.among(parameters, ready_order)
    return Model(
        parameters=held,
        ready_order=ready_order,
        frozen_bytes=state_bytes + (0 if gathers_frozen else frozen.size_bytes),
        buffers=read_buffers(table["buffers"]),
        forward=forward,
        backward=backward,
        optimizer=optimizer_work(workload.optimizer, parameters, device),
        launch_s=device.launch_s,
        activation_bytes=activation_bytes,
        recast_bytes=step.recast_bytes,
        provenance=roofline_provenance(
            table,
            workload,
            device,
            arithmetic,
            convolutions=any(one[0] == "convolution" for one in table["operators"]),
        ),
        basis="roofline",
        sample_bytes=round(step.input_bytes / batch),
        forward_modules=tuple(table["forward_modules"]),
        forward_outputs=outputs if knows_outputs else (),
        batch_norms=batch_norms_of(table),
        compiled_blocks=blocks,
        float8_gathered=linears.gathered if linears else frozenset(),
        flops=float(flops),
    )


def _checkpointed(
    table: dict[str, Any],
    workload: Workload,
    step: Step,
    kept: KeptBytes,
    works: tuple[tuple[Work, ...], tuple[Work, ...]],
    priced: Callable[[Row], Work],
) -> tuple[tuple[Work, ...], tuple[Work, ...], float]:
    """Forward and backward with what runs again, and the bytes that are kept meanwhile."""
    (forward, backward), policy = works, workload.checkpointing
    if policy is None:
        return forward, backward, kept.at_most({}, step.first_gradients_bytes)
    if policy.memory_budget is not None:
        whole = [(0, len(step.forward))]
        graphs = whole if workload.compile is True else [block.rows for block in kept.blocks]
        plan = budgeted(step.forward, graphs, policy.memory_budget)
        outside_bytes = 0.0 if workload.compile is True else kept.outside_bytes
        held_bytes = plan.kept_bytes + outside_bytes + step.first_gradients_bytes
        return forward, with_budget(backward, kept.blocks, plan, priced), held_bytes
    names = checkpointed(policy, table["name"], table["blocks"])
    chosen = [one for one in kept.blocks if one.name in names and one.backward is not None]
    compiled = bool(workload.compile)
    reruns = reruns_of(policy, step.forward, chosen, compiled=compiled)
    forward, backward = with_reruns(forward, backward, chosen, reruns, priced, compiled=compiled)
    return forward, backward, kept.at_most(reruns, step.first_gradients_bytes)


@dataclass(frozen=True)
class _Frozen:
    """Parameters that are not trained, and their places among all in registration order."""

    parameters: tuple[Parameter, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, table: dict[str, Any], workload: Workload) -> _Frozen:
        if "frozen" not in table:
            return cls((), ())
        columns = table["frozen"]
        return cls(read_parameters(columns, workload.precision), tuple(columns["place"]))

    @property
    def size_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)

    def among(
        self, trained: tuple[Parameter, ...], ready_order: tuple[int, ...]
    ) -> tuple[tuple[Parameter, ...], tuple[int, ...]]:
        """All parameters, and the places among them of those that get a gradient."""
        together = list(trained)
        for place, parameter in zip(self.places, self.parameters, strict=True):
            together.insert(place, parameter)
        is_frozen = frozenset(self.places)
        moved = [place for place in range(len(together)) if place not in is_frozen]
        return tuple(together), tuple(moved[place] for place in ready_order)


class _Pricing:
    """Works of rows; those that repeat are priced once."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self._works: dict[Row, Work] = {}

    def work(self, row: Row) -> Work:
        """The work of one row."""
        work = self._works.get(row)
        if work is None:
            works = [self._law.work(one) for one in row]
            work = self._works[row] = joined(works) if works else Work(0.0)
        return work


class _Prices(NamedTuple):
    """Prices of rows inside of blocks and outside: torch.compile may take blocks alone."""

    inside: _Pricing
    outside: _Pricing

    @classmethod
    def of(
        cls,
        table: dict[str, Any],
        workload: Workload,
        device: Device,
        arithmetic: Arithmetic,
        step: Step,
    ) -> _Prices:
        """Find the prices of a captured model."""

        def pricing(workload: Workload) -> _Pricing:
            left, operators = other_left(table, workload), chain.from_iterable(step.forward)
            return _Pricing(Law.of(workload, device, arithmetic, left, operators))

        inside = pricing(workload)
        if workload.compile != "blocks":
            return cls(inside, inside)
        return cls(inside, pricing(workload.model_copy(update={"compile": False})))

    def works(
        self, rows: Sequence[Row], names: Sequence[str], blocks: Sequence[str]
    ) -> tuple[Work, ...]:
        """Work of rows of modules or parameters; `blocks`: names of those compiled on their own."""
        inner = tuple(f"{block}." for block in blocks)
        return tuple(
            (self.inside if name.startswith(inner) else self.outside).work(row)
            for row, name in zip(rows, names, strict=True)
        )


def _compiled_blocks(table: dict[str, Any], workload: Workload) -> tuple[str, ...]:
    """The blocks that are compiled on their own; raises InputError where the model has none."""
    if workload.compile != "blocks":
        return ()
    if not table["blocks"]:
        reason = f"{table['name']} has no blocks (numbered modules of several layers); write true"
        raise InputError("workload.compile", reason)
    return tuple(table["blocks"])


def _float8_linears(
    table: dict[str, Any], workload: Workload, device: Device
) -> Float8Linears | None:
    """The layers that are computed in float8; raises InputError."""
    if not workload.float8:
        return None
    if "fp8" not in device.peak_flops_per_s:
        problem = f"{device.name} has no fp8 rate; drop it, or state cluster.device.peak_flops"
        raise InputError("workload.float8", problem)
    left, compiled = other_left(table, workload), bool(workload.compile)
    return Float8Linears.of(table, workload.float8, compiled=compiled, left=left)


def _scores_bytes(step: Step, arithmetic: Arithmetic) -> list[float]:
    """Bytes that rows of the forward keep of attention that is written out.

    Those are the softmax, what dropout left of it, and its mask.
    """
    each_bytes = arithmetic.softmax_bytes + arithmetic.matmul_bytes + 1
    return [
        each_bytes * sum(one.count * one.m * one.n for one in row if one.kind == "attention")
        for row in step.forward
    ]


# --- where an estimate's figures come from, in words ----------------------------------------------


def _layers_provenance(
    table: dict[str, Any], workload: Workload, arithmetic: Arithmetic
) -> Iterator[Provenance]:
    """The assumptions about a model's layers that an estimate makes."""
    if workload.compile:
        left = other_left(table, workload)
        what = f"{left:.0%} of the bytes beside matrix products left by torch.compile"
        yield Provenance("compute layers", what, "assumed")
    elif is_recurrent(table):
        yield Provenance(
            "compute layers", "recurrent ones as products; none was measured", "assumed"
        )
    elif is_convolutional(table) and arithmetic.is_half and workload.memory_format is None:
        what = "contiguous tensors, torch's default, which convolutions transpose both ways"
        yield Provenance("compute layers", what, "assumed")


def roofline_provenance(
    table: dict[str, Any],
    workload: Workload,
    device: Device,
    arithmetic: Arithmetic,
    *,
    convolutions: bool,
) -> tuple[Provenance, ...]:
    """The sources of an estimate's rates; `convolutions`: the model has some."""
    rates, reached = [arithmetic.rate], f"{device.efficiency(arithmetic.rate):.0%}"
    of_convolutions = arithmetic.convolution_rate(device)
    if convolutions and of_convolutions not in rates:
        rates.append(of_convolutions)
    peaks = [f"{device.peak_flops_per_s[rate] / 1e12:g} TFLOP/s {rate}" for rate in rates]
    others = " for convolutions, torch's default" if len(rates) > 1 else ""
    mostly = of_convolutions if is_convolutional(table) else arithmetic.rate
    recurs = is_recurrent(table)
    by_them = f"{device.efficiency(of_convolutions, convolution=True):.0%}"
    if convolutions and by_them != reached:
        reached = f"{reached} (convolutions {by_them})"
    return (
        Provenance("workload.model", table["source"], "measured"),
        Provenance(
            "compute time",
            f"roofline of {device.name}: {', '.join(peaks)}{others}, "
            f"{device.memory_bandwidth_bytes_per_s / 1e9:g} GB/s",
            device.rates_trust(),
        ),
        Provenance(
            "compute efficiency",
            f"{reached} of the FLOP rate, {device.memory_efficiency:.0%} of the bandwidth reached "
            f"by {table['name']}{'' if recurs else _told_by(device, mostly)}",
            "assumed" if recurs else device.efficiency_trust(mostly),
        ),
        *_layers_provenance(table, workload, arithmetic),
    )


def _told_by(device: Device, rate: Rate) -> str:
    if device.measured and (steps := device.measured.steps.get(rate)):
        return f"; set by {steps} steps in {device.measured.record}"
    steps = device.published_steps.get(rate)
    return f"; set by {steps} measured steps" if steps else ""
