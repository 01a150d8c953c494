"""The optimizer in DDP's hook: each bucket's parameters are updated once it is reduced.

Source: torch 2.13 torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py
(_apply_optim_in_backward_hook). On a stream of its own the hook waits for the all-reduce, divides,
and takes a step of each parameter's own optimizer; the host launches all that within the hook. The
end of the backward waits for that stream, and drops the gradients. Nothing is copied back
(reducer.cpp: finalize_bucket_dense returns early).
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.strategy import Bucket, Stage
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import Model, Work
from ddpsim.workload.optimizer import one_parameters_work

_NOTHING = Launch(0, 0)


@dataclass(frozen=True)
class OptimizerInHook:
    """The steps of a model's parameters, in ticks."""

    model: Model
    optimizer: Optimizer
    prices: Prices

    def after(self, bucket: Bucket) -> Bucket:
        """The bucket, reduced and then divided and used up."""
        divided = self.prices.passed(2 * bucket.size_bytes)
        unused = frozenset(self.model.unused)
        all_bytes = sum(each.size_bytes for each in self.model.used)
        steps = [self._step(i, all_bytes) for i in bucket.parameters if i not in unused]
        reduced = Stage(
            _NOTHING,
            bucket.size_bytes,
            "then its optimizer",
            after=self.prices.launch([divided, *steps]),
            is_awaited=False,
        )
        return bucket._replace(stages=(reduced,), copy_back=_NOTHING)

    def _step(self, parameter: int, all_bytes: int) -> Work:
        """Work of one parameter: the whole optimizer's time by its part of `all_bytes`."""
        share = self.model.parameters[parameter].size_bytes / all_bytes
        whole_s = self.model.optimizer.device_s
        return one_parameters_work(self.optimizer, share * whole_s, self.prices.device)
