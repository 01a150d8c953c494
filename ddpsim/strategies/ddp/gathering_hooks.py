"""Hooks that gather in place of an all-reduce: 8-bit quantisation, and top-k sparsification.

Quantisation: torch 2.13 torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py, whose
operators were counted with a dispatch mode, observers and all. A bucket's observer reads values on
the host (MinMaxObserver.to, calculate_qparams, FloatTensor): the host waits for the device before
the first all-gather. The callbacks run within the hook on the host's thread and launch on streams
of their own: the second all-gather follows the first, whatever the backward does. Each rank's
gradients are then made floats again and added up, one rank after another.

Top-k: torch has no such hook. Assumed is one that adds what it kept back, takes torch.topk of the
absolute values, and gathers values and their int64 indices; a callback adds up what all have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from ddpsim.scenario.options.hooks import TopK
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.strategy import Bucket, Stage
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import ITEM_BYTES, Work

CHANNEL = 512  # elements of a channel: quantization_perchannel_hook's bucket_size
_FLOAT, _INDEX = 4, 8  # bytes
# small operators of an observer and its scales, of a tensor or of channels
_OBSERVES_TENSOR, _OBSERVES_CHANNELS = 22, 20
_TO_DEVICE = 4  # copies of three buffers and the scales, on a GPU alone
_SELECTION_PASSES = 5  # torch's TensorTopK.cu on float32: four digits of 8 bits, then a gathering


@dataclass(frozen=True)
class GatheringHook:
    """What such a hook does to each bucket, among so many ranks."""

    prices: Prices
    ranks: int

    def staged(self, bucket: Bucket, dtype: str) -> Bucket:
        """The bucket under the scenario's hook; as it is where that hook gathers nothing."""
        elements = bucket.size_bytes // ITEM_BYTES[dtype]
        match self.prices.ddp.comm_hook:
            case "quantization_pertensor":
                return self._of_tensor(bucket, elements)
            case "quantization_perchannel":
                return self._of_channels(bucket, elements)
            case "top_k":
                return self._sparse(bucket, elements, self.prices.ddp.top_k or TopK())
        return bucket

    def _of_tensor(self, bucket: Bucket, elements: int) -> Bucket:
        float_bytes = _FLOAT * elements
        quantised = [self._passed(2 * float_bytes) for _ in range(4)]  # div, round, add, clamp
        of_rank = [self._passed(passes * float_bytes) for passes in (1.25, 2, 2, 3)]
        return self._quantised(
            bucket,
            elements,
            values=2,
            observed=[
                self._passed(float_bytes),
                *(_OBSERVES_TENSOR * [self._passed(0)]),
            ],
            quantised=quantised,
            summed=[
                self._passed(float_bytes),
                *(self.ranks * of_rank),
                self._passed(2 * float_bytes),
            ],
        )

    def _of_channels(self, bucket: Bucket, elements: int) -> Bucket:
        """Quantise channels of 512, padded by 1 to 512: four operators, and three for each rank."""
        channels = elements // CHANNEL + 1
        padded_bytes = _FLOAT * CHANNEL * channels
        once, twice = self._passed(padded_bytes), self._passed(2 * padded_bytes)
        one = self._passed(2 * _FLOAT * CHANNEL)
        of_rank = [self._passed(passes * padded_bytes) for passes in (1.25, 1, 3)]
        of_rank.append(_times(3 * channels, one))
        return self._quantised(
            bucket,
            CHANNEL * channels,
            values=2 * channels,
            observed=[twice, once, *(_OBSERVES_CHANNELS * [self._passed(0)])],
            quantised=[once, _times(4 * channels, one), twice],
            summed=[once, *(self.ranks * of_rank), twice],
        )

    def _quantised(
        self,
        bucket: Bucket,
        elements: int,
        *,
        values: int,
        observed: Sequence[Work],
        quantised: Sequence[Work],
        summed: Sequence[Work],
    ) -> Bucket:
        """`values`: scales and zero points of a rank; NCCL's all-gather copies into a list."""
        scales = [*observed, *(_TO_DEVICE * [self._passed(0)]), *self._lists(_FLOAT * values)]
        to_bytes = [*quantised, self._passed((_FLOAT + 1) * elements), *self._lists(elements)]
        gathered = self.ranks * [self._passed(2 * elements)]
        stages = (
            Stage(
                self.prices.launch(scales),
                self.ranks * _FLOAT * values,
                "scales and zero points",
                "all_gather",
                is_awaited=False,
                host_waits=True,
            ),
            Stage(
                self.prices.launch(to_bytes),
                self.ranks * elements,
                "8-bit gradients",
                "all_gather",
                after=self.prices.launch([*gathered, *summed]),
                is_awaited=False,
                is_chained=True,
            ),
        )
        return bucket._replace(
            wire_bytes=self.ranks * elements,
            stages=stages,
            flying_bytes=self.ranks * elements + 2 * _FLOAT * elements,
        )

    def _sparse(self, bucket: Bucket, elements: int, spec: TopK) -> Bucket:
        """Values and indices of the largest elements; the rest is kept where it is fed back."""
        size_bytes, kept = bucket.size_bytes, max(1, ceil(spec.fraction * elements))
        value_bytes = kept * (size_bytes // elements)
        before = [
            self._passed(2 * size_bytes),
            self._passed(_SELECTION_PASSES * size_bytes),
        ]
        if spec.error_feedback:  # added to the bucket, copied, and zeroed where it is sent
            before = [
                self._passed(3 * size_bytes),
                *before,
                self._passed(2 * size_bytes),
            ]
            before.append(self._passed(kept * _INDEX + value_bytes))
        chosen = self._passed(kept * _INDEX + 2 * value_bytes)
        added = self._passed(kept * _INDEX + 3 * value_bytes)
        after = [
            self._passed(size_bytes),
            *(self.ranks * [added]),
            self._passed(2 * size_bytes),
        ]
        stages = (
            Stage(
                self.prices.launch([*before, chosen]),
                self.ranks * value_bytes,
                "top-k values",
                "all_gather",
                is_awaited=False,
            ),
            Stage(
                Launch(0, 0),
                self.ranks * kept * _INDEX,
                "top-k indices",
                "all_gather",
                after=self.prices.launch(after),
                is_awaited=False,
            ),
        )
        sent_bytes = self.ranks * (value_bytes + kept * _INDEX)
        return bucket._replace(
            wire_bytes=sent_bytes,
            stages=stages,
            kept_bytes=size_bytes * spec.error_feedback,
            flying_bytes=sent_bytes + size_bytes,
        )

    def _passed(self, size_bytes: float) -> Work:
        return self.prices.passed(size_bytes)

    def _lists(self, size_bytes: int) -> list[Work]:
        """Zeros for what each rank sends (_get_allgather_out_list)."""
        return self.ranks * [self._passed(size_bytes)]


def _times(number: int, work: Work) -> Work:
    """So many of the same."""
    return Work(number * work.device_s, number * work.kernels, number * work.host_s)
