"""DDP's own mixed precision: half copies of the parameters, and a hook that takes gradients back.

Source: torch 2.13 torch/nn/parallel/distributed.py (_setup_mixed_precision_params, _cast_buffers,
_root_copy_hook, _module_wait_for_copy_hook) and ddp_comm_hooks/mixed_precision_hooks.py
(_reducer_allreduce_and_upcast_hook); reducer.cpp (initialize_buckets: a bucket is in param_dtype,
while caps count the parameters' bytes).

Before each forward the host launches a copy of every parameter on a stream of its own, and each
module waits for its copies. The hook casts a full bucket to reduce_dtype and launches its
all-reduce; on another stream it waits for that, divides, and casts each gradient to float32. The
end of the backward waits for that stream, and then copies all buckets back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddpsim.errors import InputError
from ddpsim.scenario.options.hooks import DdpMixedPrecision
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import Compute, Instruction
from ddpsim.strategies.strategy import Bucket, Stage
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import ITEM_BYTES, Model, Parameter, Work, joined

# the host's seconds a parameter in Python and operators, launches apart: torch 2.13 on one core of
# an EPYC, 1000 parameters of one element, DDP with and without; copy and waits, hook and cast
_COPY_HOST_S = 60e-6
_UPCAST_HOST_S = 40e-6
_NOTHING = Launch(0, 0)


class LowCopies(NamedTuple):
    """The copies before a forward, of `size_bytes` in all, and those where there are gradients.

    Gradients that wait for more are cast to the copies' type too.
    """

    first: tuple[Instruction, ...] = ()
    later: tuple[Instruction, ...] = ()
    size_bytes: int = 0

    def made(self, *, over_gradients: bool) -> tuple[Instruction, ...]:
        """What comes before a forward."""
        return self.later if over_gradients else self.first


NO_COPIES = LowCopies()


def as_reduced(model: Model, types: DdpMixedPrecision | None) -> Model:
    """The model as the reducer sees it: gradients and buffers as they are cast, if they are."""
    if types is None:
        return model
    return replace(
        model,
        parameters=tuple(each._replace(dtype=types.param) for each in model.parameters),
        buffers=tuple(each._replace(dtype=types.buffer or each.dtype) for each in model.buffers),
    )


def check_modules(model: Model, types: DdpMixedPrecision, *, static_graph: bool) -> None:
    """Raise InputError where torch would stop; each was seen with two processes on CPUs.

    Each module hooks its own parameters when it is called, so tied ones twice, which a static
    graph counts (reducer.cpp).
    """
    if model.ties_weights and not static_graph:
        raise InputError(
            "ddp.mixed_precision",
            "hooks the weight that two modules of this model share twice: torch stops in 'Expected "
            "to mark a variable ready only once'; write static_graph: true",
        )
    if model.never_called:
        raise InputError(
            "ddp.mixed_precision",
            f"hooks parameters where their module is called, and {model.never_called} never is "
            "(see nn.MultiheadAttention): torch stops in 'Expected to have finished reduction'; "
            "drop it, and compute under autocast",
        )
    if model.batch_norms and types.buffer != types.param:
        raise InputError(
            "ddp.mixed_precision",
            "leaves batch norms statistics of another type than their weights: torch stops in "
            f"'expected scalar type'; write buffer: {types.param}",
        )


@dataclass(frozen=True)
class MixedPrecision:
    """A model's copies and buckets under these `types`, in ticks."""

    model: Model
    types: DdpMixedPrecision
    prices: Prices

    @property
    def copies(self) -> LowCopies:
        """The copies of all parameters."""
        copied = [self._cast(each.numel, self.types.param, _COPY_HOST_S) for each in self._all]
        again = [joined([work, self.prices.operator(work)]) for work in copied]
        size_bytes = as_reduced(self.model, self.types).gradient_bytes
        return LowCopies(self._beside_compute(copied), self._beside_compute(again), size_bytes)

    def reduced(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """Buckets as they are sent; all are awaited before the first is copied back."""
        back = [self._cast(each.numel, self.types.sent, 0.0) for each in self._all]
        *others, last = map(self._reduced, buckets)
        return (*others, last._replace(copy_back=self.prices.launch(back)))

    @property
    def _all(self) -> tuple[Parameter, ...]:
        return self.model.parameters

    def _reduced(self, bucket: Bucket) -> Bucket:
        types = self.types
        numels = [self._all[i].numel for i in bucket.parameters]
        wire_bytes = sum(numels) * ITEM_BYTES[types.sent]
        casts = types.sent != types.param
        before = [self._cast(sum(numels), types.param, 0.0, types.sent)] if casts else []
        divided = self.prices.passed(2 * wire_bytes)
        upcast = [self._cast(numel, types.param, _UPCAST_HOST_S) for numel in numels]
        stage = Stage(
            self.prices.launch(before),
            wire_bytes,
            "then its casts",
            after=self.prices.launch([divided, *upcast]),
            is_awaited=False,
        )
        kept_bytes = wire_bytes if casts else 0  # what was cast stays until the next backward
        return bucket._replace(
            wire_bytes=wire_bytes, stages=(stage,), copy_back=_NOTHING, kept_bytes=kept_bytes
        )

    def _cast(self, numel: int, one: str, host_s: float, other: str = "float32") -> Work:
        """A copy from one type to another."""
        moved = self.prices.moved(numel * (ITEM_BYTES[one] + ITEM_BYTES[other]))
        return moved._replace(host_s=host_s)

    def _beside_compute(self, works: Sequence[Work]) -> tuple[Instruction, ...]:
        """The host launches all of them; what is left of them then is waited for."""
        host_ns = end_ns = 0
        for work in map(self.prices.ticks.launch, works):
            host_ns += work.host_ns
            end_ns = max(end_ns, host_ns) + work.device_ns
        return (Compute("forward", host_ns, end_ns - host_ns),)
