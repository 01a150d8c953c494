"""Adafactor and Muon against torch's own: operators, bytes, FLOPs and states of three models."""

from __future__ import annotations

from typing import Any

import pytest

from ddpsim import load_scenario
from ddpsim.errors import InputError
from ddpsim.scenario.workload import Optimizer
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Parameter
from ddpsim.workload.optimizer import optimizer_state_bytes, optimizer_work
from ddpsim.workload.optimizer_operators import is_muons, optimizer_operators

torch = pytest.importorskip("torch", reason="its optimizers are the oracle")

ADAFACTOR, MUON = Optimizer(name="adafactor"), Optimizer(name="muon")
# what launches no work of its own, and the step's number, which is on the host
NOTHING = ("t", "permute", "_local_scalar_dense", "expand", "view", "_unsafe_view", "detach")


def models() -> list[Any]:
    """A language model with a head of its own, a convolutional network, and one of 3-D weights."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(32, 2, 80, batch_first=True)
    words = nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 50))
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 10))
    experts = nn.Sequential(nn.Linear(16, 24), nn.Bilinear(6, 4, 10), nn.Linear(10, 40, bias=False))
    return [words, images, experts]


def listed(module: Any) -> list[Parameter]:
    edges = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    outer = {id(parameter) for edge in edges for parameter in edge.parameters()}
    return [
        Parameter(name, p.numel(), "float32", shape=tuple(p.shape), is_edge=id(p) in outer)
        for name, p in module.named_parameters()
    ]


def optimizers(module: Any, optimizer: Optimizer) -> list[Any]:
    """torch's own, with gradients to take a step."""
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    given = list(zip(listed(module), module.parameters(), strict=True))
    if optimizer.name == "adafactor":
        decay = optimizer.weight_decay
        return [torch.optim.Adafactor([p for _, p in given], weight_decay=decay)]
    own = [p for one, p in given if is_muons(optimizer, one)]
    others = [p for one, p in given if not is_muons(optimizer, one)]
    steps = 5 if optimizer.ns_steps is None else optimizer.ns_steps
    return [torch.optim.Muon(own, ns_steps=steps), torch.optim.AdamW(others)]


def recorded(step: Any) -> list[tuple[int, int]]:
    """Bytes that each operator of a step reads and writes; a matrix that is added to is copied."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[int, int]] = []
    last = [""]

    def size(tensors: Any) -> int:
        return sum(each.numel() * each.element_size() for each in tensors)

    class Log(TorchDispatchMode):
        def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's own are untyped
            self, operator, types, args=(), kwargs=None
        ):
            made = operator(*args, **(kwargs or {}))
            name = operator.__name__.partition(".")[0]
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if name == "_local_scalar_dense" and "norm" in last[0]:
                found.append((4, 4))
            last[0] = name
            if name in NOTHING or not tensors or (name == "add_" and not tensors[0].dim()):
                return made
            if name == "addmm":
                found.append((size([made]), size([made])))
            distinct = {one.untyped_storage().data_ptr(): one for one in tensors}
            found.append((size(distinct.values()), size([made])))
            return made

    with Log():
        step()
    return found


@pytest.mark.parametrize("options", [ADAFACTOR, MUON], ids=lambda one: one.name)
@pytest.mark.parametrize("place", range(3))
def test_states_are_as_large_as_torchs(options: Optimizer, place: int) -> None:
    module = models()[place]
    kept = 0
    for optimizer in optimizers(module, options):
        optimizer.step()
        values = (value for state in optimizer.state.values() for value in state.values())
        kept += sum(one.numel() * one.element_size() for one in values if one.dim())
    assert optimizer_state_bytes(options, listed(module)) == kept


@pytest.mark.parametrize(
    "options",
    [ADAFACTOR, Optimizer(name="adafactor", weight_decay=0.1), MUON],
    ids=["adafactor", "adafactor with decay", "muon"],
)
@pytest.mark.parametrize("place", range(3))
def test_flops_and_bytes_are_torchs(options: Optimizer, place: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = models()[place]
    first, *_ = optimizers(module, options)
    own = [one for one in listed(module) if options.name == "adafactor" or is_muons(options, one)]
    operators = [each for one in own for each in optimizer_operators(options, one)]
    with FlopCounterMode(display=False) as counted:
        first.step()
    assert counted.get_total_flops() == sum(each.flops for each in operators)
    real = recorded(first.step)
    told = [(round(each.bytes_read), round(each.bytes_written)) for each in operators]
    assert told == real


ONE = {
    "schema": "ddpsim/1",
    "workload": {"model": "llama-1b", "batch_per_rank": 1, "optimizer": "muon"},
    "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-80gb"},
}


def test_muon_takes_hidden_matrices_alone() -> None:
    scenario = load_scenario(ONE)
    model = build_model(scenario)
    taken = [one.name for one in model.parameters if is_muons(MUON, one)]
    others = {one.name.rpartition(".")[0].rpartition(".")[2] for one in model.parameters} - {
        name.rpartition(".")[0].rpartition(".")[2] for name in taken
    }
    assert taken
    assert not any("embed" in name or "head" in name for name in taken)
    assert all("norm" in name or "embed" in name or "head" in name for name in others)


def test_shapes_have_to_be_known() -> None:
    listed = [Parameter("a.weight", 64, "float32")]
    device = load_scenario(ONE).cluster.device
    with pytest.raises(InputError, match=r"nobody tells that of a\.weight"):
        optimizer_work(MUON, listed, device)


def test_masters_are_updated_in_float32() -> None:
    half = [Parameter("a.weight", 2**20, "bfloat16", shape=(1024, 1024))]
    with_masters = MUON.model_copy(update={"masters": True})
    assert optimizer_state_bytes(MUON, half) == 2 * 2**20
    assert optimizer_state_bytes(with_masters, half) == (4 + 4) * 2**20


def test_adafactors_host_waits_for_each_parameter() -> None:
    """So what its kernels take the host is the device's time too, where parameters are small."""
    device = load_scenario(ONE).cluster.device
    small = [Parameter("a.weight", 64, "float32", shape=(8, 8))]
    work = optimizer_work(ADAFACTOR, small, device)
    launches = len(optimizer_operators(ADAFACTOR, small[0]))
    assert work.host_s == work.kernels == 0
    assert work.device_s == pytest.approx(24e-6 + launches * device.launch_s)
