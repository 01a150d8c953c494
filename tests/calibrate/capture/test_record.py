"""A step recorded on shapes is the step that torch runs on numbers, under DDP and fully_shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="a capture runs torch")

import torch
import torch.distributed as dist
from models.library_models import LIBRARY_MODELS
from models.small_models import BATCH, MODELS, total
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from calibrate.capture.capture import Document, capture, render
from calibrate.capture.record import Recording, record, trained_parameters
from calibrate.capture.shapes import building, drop_memory, tensors, without_memory
from calibrate.capture.sources import Source, of_batch
from calibrate.measure.model.training import Made
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.ddp.buckets import plan_buckets
from ddpsim.strategies.instructions import Communicate
from ddpsim.workload.operators import MULTIPLYING, Operator

RANKS = 64
CAP_MIB = 5e-4
CASES = {**MODELS, **LIBRARY_MODELS}
Calls = list[tuple[str, int]]  # operations, and the bytes of the whole tensor
OPERATIONS = {
    "c10d::broadcast_": "broadcast",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}

NOT_SHARDED = {
    "learned loss": "fully_shard takes no scalar parameter",
    "two types": "fully_shard takes one type in a unit",
    "sparse": "fully_shard takes no sparse gradient",
}


def loss_of(said: Any) -> Tensor:
    """The model's own loss, or one of its outputs."""
    return said.loss if hasattr(said, "loss") else total(said)


def made(name: str) -> Made:
    """A model with its inputs, in memory."""
    torch.manual_seed(0)
    build, inputs = CASES[name]
    one = Made(build().train(), inputs(), loss_of)
    if any(map(is_lazy, one.model.parameters())):
        one.forward()
    return one


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Without = Callable[[int, int | None], Made]  # a batch and a size -> the model without memory


@pytest.fixture(scope="module")
def without(name: str) -> Without:
    build, inputs = CASES[name]
    with building():
        model, given = build().train(), inputs()
    drop_memory(model)
    shapes = without_memory(given)
    return lambda batch, _: Made(model, of_batch(shapes, batch), loss_of)


@pytest.fixture(scope="module")
def document(name: str, without: Without) -> Document:
    return capture(Source(name, name, "own", name, without, BATCH))


@pytest.fixture(scope="module")
def step(document: Document, without: Without) -> Recording:
    """Recorded once the capture has made what is lazy."""
    one = without(BATCH, None)
    return record(one.model, one.forward, "fp32")


class Sent(TorchDispatchMode):
    """Notes the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (operation := OPERATIONS.get(func._schema.name)) is not None:
            sizes = [one.numel() * one.element_size() for one in tensors(args)]
            self.calls.append((operation, max(sizes)))
        return func(*args, **(kwargs or {}))


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's, which keeps a mask of bytes where a CPU's keeps one of floats."""
    return torch.native_dropout(x, p, train=True)[0] if training and p else x


class OneOperator(torch.autograd.Function):
    """A recurrent layer as one operator of autograd, as cuDNN's is, whose states get gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            ctx.given = [one.detach().requires_grad_() for one in given]
            ctx.made = run(*ctx.given)
        return tuple(one.detach() for one in ctx.made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.autograd.grad(ctx.made, ctx.given, gradients)


def gru(x: Tensor, state: Tensor, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """CUDA's, whose arguments autograd sees in this order."""

    def run(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return torch.gru(x, others[-1], list(others[:-1]), *options)

    made: tuple[Tensor, ...] = OneOperator.apply(run, x, *weights, state)
    return made


@contextmanager
def fake_ranks() -> Iterator[None]:
    """The first of as many ranks runs, its operators as CUDA's."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with patch("torch.nn.modules.rnn._VF.gru", gru), patch.object(F, "dropout", dropout):
            yield
    finally:
        dist.destroy_process_group()


def attended(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def attended_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# flop_counter knows CUDA's kernels, and not the one of a CPU
ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attended,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attended_backward,
}


class Real:
    """A step with numbers under DDP, once its buckets are those that stay."""

    def __init__(self, name: str) -> None:
        self.parameters: list[tuple[str, tuple[int, ...]]] = []
        self.ready: list[int] = []
        self.buckets: list[list[str]] = []
        self.kept: dict[int, Any] = {}
        one = made(name)
        with fake_ranks():
            self._train(one)

    def _train(self, one: Made) -> None:
        named = trained_parameters(one.model)
        names = {id(tensor): name for name, tensor in named.items()}
        self.parameters = [(name, tuple(tensor.shape)) for name, tensor in named.items()]
        for place, tensor in enumerate(named.values()):
            tensor.register_post_accumulate_grad_hook(
                lambda _, place=place: self.ready.append(place)
            )
        group = (*one.model.parameters(), *one.model.buffers())
        sizes = [tensor.numel() * tensor.element_size() for tensor in one.model.parameters()]
        self.parameter_bytes = sum(sizes)
        self._owned = {tensor.untyped_storage()._cdata for tensor in group}
        wrapped = DistributedDataParallel(one.model, bucket_cap_mb=CAP_MIB)
        sent, counter = Sent(), FlopCounterMode(display=False, custom_mapping=ON_CPU)

        def reduce(state: None, bucket: Any) -> Any:
            buffer = bucket.buffer()
            sent.calls.append(("all_reduce", buffer.numel() * buffer.element_size()))
            self.buckets.append([names[id(tensor)] for tensor in bucket.parameters()])
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        reduce.__annotations__.clear()  # DDP reads them, and they are text here
        wrapped.register_comm_hook(None, reduce)
        trained = one._replace(model=wrapped)
        for _ in range(2):  # buckets are rebuilt, and their sizes sent, before the second
            trained.forward().backward()
        for noted in (self.ready, self.buckets, sent.calls):
            noted.clear()
        with sent, counter:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                loss = trained.forward()
            loss.backward()
        self.calls, self.flops = sent.calls, counter.get_total_flops()

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._owned:
            self.kept[storage._cdata] = storage
        return tensor

    @property
    def kept_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())


@pytest.fixture(scope="module")
def real(name: str) -> Real:
    return Real(name)


def operators(step: Recording) -> list[Operator]:
    return [one for row in (*step.forward, *step.backward) for one in row]


def job(document: Document, folder: Path, **ddp: Any) -> Job:
    path = folder / "model.json"
    path.write_text(render(document), encoding="utf-8")
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": str(path), "batch_per_rank": BATCH, "precision": "fp32"},
        "cluster": {"nodes": RANKS // 8, "gpus_per_node": 8, "device": "a100-sxm-80gb"},
        "ddp": {"torch": "2.13", **ddp},
    }
    return resolve(load_scenario(scenario))


def listed(job: Job) -> Calls:
    """The collectives of a step that ddpsim lists."""
    step = job.program.steady_step
    return [(one.operation, one.size_bytes) for one in step if isinstance(one, Communicate)]


def test_flops_are_those_of_flop_counter(step: Recording, real: Real) -> None:
    """But of groups, whose weights' gradients it counts for all pairs of channels."""
    surplus = sum(
        (one.count - 1) * one.flops
        for one in operators(step)
        if one.kind == "convolution_weight_gradient"
    )
    assert sum(one.flops for one in operators(step)) + surplus == real.flops


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 5}),
        (nn.RNN, {"nonlinearity": "relu", "bias": False}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.2, "batch_first": True}),
    ],
)
def test_recurrent_layers_have_the_flops_and_results_of_a_cpu(
    kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    """Count as much where all states get gradients, which cuDNN always makes."""
    layer = kind(7, 9, **options)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    batch = 4 if layer.batch_first else 6
    states = [torch.randn(count, batch, width) for width in (layer.proj_size or 9, 9)]
    shapes: list[list[torch.Size]] = []

    def loss(x: Tensor, *states: Tensor) -> Tensor:
        made = tensors(layer(x, states if kind is nn.LSTM else states[0]))
        shapes.append([one.shape for one in made])
        return torch.stack([one.sum() for one in made]).sum()

    inputs = [one.requires_grad_() for one in (torch.randn(4, 6, 7), *states)]
    counter = FlopCounterMode(display=False)
    with counter, torch.backends.mkldnn.flags(enabled=False):
        loss(*inputs).backward()
    bare = [one.detach().to("meta").requires_grad_() for one in inputs]
    step = record(layer, lambda: loss(*bare), "fp32")
    assert sum(one.flops for one in operators(step)) == counter.get_total_flops()
    assert shapes[0] == shapes[1]


def test_gradients_are_ready_in_the_real_order(
    document: Document, step: Recording, real: Real
) -> None:
    columns = document["parameters"]
    shapes = map(tuple, columns["shape"])
    assert list(zip(columns["name"], shapes, strict=True)) == real.parameters
    assert document["captured"]["ready_order"] == step.ready == real.ready
    assert len(step.backward) == len(real.ready) + 1


def test_autograd_keeps_as_many_bytes(name: str, step: Recording, real: Real) -> None:
    """Within what a CPU's fused attention keeps else: CUDA's keeps a random state too."""
    if name == "gru":
        pytest.skip("a CPU keeps other tensors of a recurrent layer than cuDNN")
    assert step.saved_bytes == pytest.approx([real.kept_bytes], rel=0.02)


def test_ddp_fills_the_listed_buckets(document: Document, real: Real, tmp_path: Path) -> None:
    """On 64 ranks: which gradients each bucket holds, and all collectives in their order.

    Frozen parameters are in no bucket, and in memory.
    """
    predicted = job(document, tmp_path, bucket_cap_mb=CAP_MIB)
    names = document["parameters"]["name"]
    model = predicted.model
    plan = plan_buckets(model.parameters, model.ready_order, predicted.scenario.ddp, model.tied)
    assert [[names[i] for i in one] for one in plan.rebuilt] == real.buckets
    assert listed(predicted) == real.calls
    assert predicted.memory().parameters == real.parameter_bytes


def test_fully_shard_launches_what_is_listed(name: str, document: Document, tmp_path: Path) -> None:
    """On 64 ranks, of the blocks that the file names and the rest."""
    if name in NOT_SHARDED:
        pytest.skip(NOT_SHARDED[name])
    one, units = made(name), [*dict.fromkeys(document["captured"]["blocks"])]
    with fake_ranks():
        for block in units:
            fully_shard(one.model.get_submodule(block))
        fully_shard(one.model)
        sent = Sent()
        with sent:
            one.forward().backward()
    assert (
        listed(job(document, tmp_path, strategy="fully_shard", fully_shard={"units": units}))
        == sent.calls
    )


def test_flops_of_a_product_are_two_for_each_multiply_add(step: Recording) -> None:
    """Strided and transposed convolutions apart, whose implicit product holds holes."""
    for one in operators(step):
        if one.kind in MULTIPLYING and one.stride == 1:
            passes = {"attention": 2, "attention_backward": 5}.get(one.kind, 1)
            assert one.flops == passes * 2 * one.count * one.m * one.n * one.k
