"""torch.nn.DataParallel: one process drives all GPUs of a machine (torch/nn/parallel)."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    compute,
    compute_all,
)
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.workload.model import Model

_PHASES = {
    "buffers": "inputs, parameters and buffers sent from GPU 0 to the others",
    "all_reduce": "gradients reduced to GPU 0",
}

# torch 2.13's replicate() on one core of an EPYC, without its broadcast: 12 us a tensor and GPU
# (transformers of 72 to 288 parameters, convolutions with batch norm of 60 to 450, 2 to 8 GPUs)
_REPLICATE_S = 12e-6


class DataParallel(Strategy):
    """Scatter the inputs, send the module to every GPU, compute there, reduce to GPU 0.

    The usual training loop has put the inputs on GPU 0. A module for each GPU is built in Python,
    and all parameters and buffers are sent there. One thread a GPU launches the forward; the
    threads take turns, as they share the interpreter's lock. Nothing is sent while the backward
    makes gradients: no buckets fill, there are no hooks and no copies. Outputs are gathered on
    GPU 0 too; their size is not known, so that is left out.
    """

    broadcast = "what GPU 0 sends"
    phases = _PHASES

    def __init__(self, context: StrategyContext) -> None:
        model, ticks, scenario = context.model, context.ticks, context.scenario
        gpus, batch = scenario.cluster.gpus_per_node, scenario.workload.batch_per_rank
        tensors = len(model.parameters) + len(model.buffers)
        self._scattered_bytes = (gpus - 1) * batch * (model.sample_bytes or 0)
        self._module_bytes = model.gradient_bytes + sum(b.size_bytes for b in model.buffers)
        self._replicate_ns = ticks.host_ns(_REPLICATE_S * tensors * gpus)
        self._launch_ns = ticks.host_ns(context.prices.launch_collective_s)
        self._forward = ticks.launches(model.forward, threads=gpus)
        self._backward = ticks.launches(model.backward)
        self._optimizer = ticks.launch(model.optimizer)
        self._around = context.around_optimizer
        sent_bytes = model.gradient_bytes
        self._gradients = Bucket(tuple(model.ready_order), sent_bytes, sent_bytes)

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield LoadBatch()
        yield from self._send_inputs_and_module()
        yield from compute_all("forward", self._forward)
        yield Mark("backward_starts")
        *works, tail = self._backward
        yield from compute_all("backward", works)
        reduced = self._reduce()
        yield reduced
        yield compute("backward", tail)
        yield Await(reduced.number)
        yield from self._around.before
        yield compute("optimizer", self._optimizer)
        yield from self._around.after
        yield Mark("step_ends")

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy: all gradients at once."""
        return (self._gradients,)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; of GPU 0, which alone holds the reduced gradients and the optimizer's."""
        held = super().resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=model.gradient_bytes)

    @property
    def _sent_before_forward(self) -> list[int]:
        sizes_bytes = (self._scattered_bytes, self._module_bytes)
        return [size for i, size in enumerate(sizes_bytes) if size or i]

    def _send_inputs_and_module(self) -> Iterator[Instruction]:
        *_, module = numbers = range(len(self._sent_before_forward))
        for number, size_bytes in zip(numbers, self._sent_before_forward, strict=True):
            if number == module:
                yield Compute("buffers", self._replicate_ns, 0)
            cause = "parameters and buffers" if number == module else "inputs"
            yield Communicate(number, self._launch_ns, "broadcast", size_bytes, cause=cause)
        for number in numbers:
            yield Await(number)

    def _reduce(self) -> Communicate:
        gradients = self._gradients
        return Communicate(
            len(self._sent_before_forward),
            self._launch_ns,
            "all_reduce",
            gradients.wire_bytes,
            bucket=0,
            bucket_bytes=gradients.size_bytes,
            num_params=len(gradients.parameters),
            cause="gradients",
        )
