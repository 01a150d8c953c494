"""What compute is estimated to take: torch's arithmetic on a device that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpsim import load_scenario
from ddpsim.errors import ScenarioError
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.workload import Optimizer
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model, Parameter, total_s
from ddpsim.workload.optimizer import moved_bytes, optimizer_state_bytes, optimizer_work
from ddpsim.workload.roofline import zoo_model
from ddpsim.workload.zoo.gpu_time import FITTED
from ddpsim.workload.zoo.step import step_of

CONVOLUTIONS = {"resnet50": 53, "vgg16": 13, "vit_b_16": 1}


def cluster_of_one(
    preset: str, name: str = "resnet50", precision: str = "fp32", **workload: Any
) -> dict[str, Any]:
    return {
        "schema": "ddpsim/1",
        "workload": {"model": name, "batch_per_rank": 32, "precision": precision} | workload,
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": preset},
    }


def modelled(
    name: str,
    precision: str,
    *,
    preset: str = "a100-sxm-80gb",
    tf32: bool = True,
    **workload: Any,
) -> Model:
    scenario = load_scenario(cluster_of_one(preset, name, precision, **workload))
    device = scenario.cluster.device
    if not tf32:
        rates = {rate: peak for rate, peak in device.peak_flops_per_s.items() if rate != "tf32"}
        device = device.model_copy(update={"peak_flops_per_s": rates})
    return zoo_model(model_table(name), scenario.workload, device)


def test_torch_leaves_convolutions_alone_to_tf32() -> None:
    torch = pytest.importorskip("torch", reason="its defaults are the oracle")
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_fp32_leaves_convolutions_to_tf32(name: str) -> None:
    """Each row of work is that of TF32 or that of a GPU without it; so many as there are layers."""
    usual, tf32 = modelled(name, "fp32"), modelled(name, "tf32")
    plain = modelled(name, "fp32", tf32=False)
    for part in ("forward", "backward"):
        rows = list(zip(*(getattr(model, part) for model in (usual, tf32, plain)), strict=True))
        assert all(own in (fast, slow) for own, fast, slow in rows)
        faster = [own for own, fast, slow in rows if fast != slow and own == fast]
        assert len(faster) == CONVOLUTIONS[name]
    (said,) = (line.source for line in usual.provenance if line.input == "compute time")
    assert "19.5 TFLOP/s fp32, 156 TFLOP/s tf32 for convolutions, torch's default, 2039 " in said


@pytest.mark.parametrize(
    ("name", "preset"), [("bert-base", "a100-sxm-80gb"), ("resnet50", "v100-sxm-32gb")]
)
def test_without_convolutions_or_tf32_fp32_is_fp32(name: str, preset: str) -> None:
    usual = modelled(name, "fp32", preset=preset)
    plain = modelled(name, "fp32", preset=preset, tf32=False)
    assert (usual.forward, usual.backward) == (plain.forward, plain.backward)
    (said,) = (line.source for line in usual.provenance if line.input == "compute time")
    assert "tf32" not in said


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("resnet50", 25_502_912),  # no biases, and no norms, which stay in half
        # what the head shares with the embedding, but no positions and norms, which are in fp32
        ("gpt2", 123_532_032),
    ],
)
def test_autocast_keeps_half_copies_of_the_weights_it_multiplies(name: str, weights: int) -> None:
    """What is kept at every batch alike; float32 keeps no weights twice, nor does bf16."""

    def at_no_batch(precision: str) -> float:
        one, two = (modelled(name, precision, batch_per_rank=n).activation_bytes for n in (32, 64))
        assert one is not None
        assert two is not None
        return 2 * one - two

    assert at_no_batch("amp-fp16") - at_no_batch("fp32") == 2 * weights
    assert at_no_batch("bf16") <= at_no_batch("fp32")


def test_half_weights_halve_activations() -> None:
    """But for a pooling's indices, and for scores that a loss takes to float32 itself."""
    for name, most in (("resnet50", 1.02), ("llama-1b", 1.4)):
        whole, half = (modelled(name, p).activation_bytes for p in ("fp32", "bf16"))
        assert whole is not None
        assert half is not None
        assert whole / 2 <= half <= most * whole / 2


def test_a_model_that_does_not_run_in_half_takes_half_the_bytes_of_float32() -> None:
    table = model_table("resnet50")
    steps = {key: step for key, step in table["steps"].items() if key != "half"}
    whole = step_of(table, "fp32", 4, 224**2)
    half = step_of(table | {"steps": steps}, "amp-bf16", 4, 224**2, half_weights=True)
    assert half.saved_bytes == whole.saved_bytes / 2
    moved = [[one.bytes_read for row in step.rows for one in row] for step in (whole, half)]
    assert moved[1] == [read / 2 for read in moved[0]]


def test_convolutions_reach_another_share_of_tf32_than_matrix_products() -> None:
    """fp32 leaves convolutions alone to TF32."""
    preset = "h100-sxm-80gb"
    device = load_scenario(cluster_of_one(preset)).cluster.device
    assert device.efficiency("tf32", convolution=True) != device.efficiency("tf32")
    resnet, bert = (modelled(name, "tf32", preset=preset) for name in ("resnet50", "bert-base"))
    usual, convolutions = (device.efficiency("tf32", convolution=c) for c in (False, True))
    said = f"{usual:.0%} (convolutions {convolutions:.0%}) of the FLOP rate"
    assert _reached(resnet).startswith(said)
    assert _reached(bert).startswith(f"{usual:.0%} of the FLOP rate")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "resnet50",
            {},
            ["contiguous tensors, torch's default, which convolutions transpose both ways"],
        ),
        ("resnet50", {"memory_format": "contiguous"}, []),
        (
            "resnet50",
            {"compile": True},
            ["60% of the bytes beside matrix products left by torch.compile"],
        ),
        ("gpt2", {}, []),
        (
            "gpt2",
            {"compile": True},
            ["25% of the bytes beside matrix products left by torch.compile"],
        ),
    ],
)
def test_what_is_taken_of_layers_is_an_input(
    name: str, options: dict[str, Any], said: list[str]
) -> None:
    model = modelled(name, "amp-bf16", **options)
    assert [p.source for p in model.provenance if p.input == "compute layers"] == said


def _reached(model: Model) -> str:
    return next(p.source for p in model.provenance if p.input == "compute efficiency")


RATE = 2039e9 * 0.85  # bytes a second that an A100 SXM 80 GB is taken to move
SCORES = 12 * 12 * 32 * 1024**2  # layers, heads, batch and tokens of GPT-2


@pytest.mark.parametrize(
    ("precision", "kept_bytes"), [("fp32", 4 + 4 + 1), ("bf16", 2 + 2 + 1), ("amp-bf16", 4 + 2 + 1)]
)
def test_attention_that_is_written_out_keeps_its_scores(precision: str, kept_bytes: int) -> None:
    fused, eager = (modelled("gpt2", precision, attention=a) for a in ("sdpa", "eager"))
    assert total_s(eager.forward) > total_s(fused.forward)
    assert eager.activation_bytes is not None
    assert fused.activation_bytes is not None
    assert eager.activation_bytes - fused.activation_bytes == pytest.approx(SCORES * kept_bytes)
    assert modelled("gpt2", precision) == fused


def test_tensor_cores_convolutions_turn_layouts_unless_they_are_channels_last() -> None:
    """Each operand is read and written again; 108 multiprocessors bound a part of that.

    What the last cache of 40 MiB holds is faster. Float32 without TF32 turns the other layout.
    """
    fed = RATE / 108 / (936e9 * 0.85 / 82)
    turned = FITTED.turned * (1 + FITTED.bound_others * (fed - 1))
    step = step_of(model_table("vgg16"), "fp32", 32, 224**2)
    convolutions = [one for row in step.forward for one in row if one.kind == "convolution"]

    def turned_s(width: int) -> float:
        each = (width / 4 * (one.bytes_read + one.bytes_written) for one in convolutions)
        cached = (1 - 1 / FITTED.cache_speedup, FITTED.cached * 40 * 2**20)
        slower = ((moved, 1 - cached[0] / (1 + (moved / cached[1]) ** 2)) for moved in each)
        return 2 * turned * sum(moved * factor for moved, factor in slower) / RATE

    def more_s(precision: str, **device: str) -> float:
        usual, last = (
            modelled("vgg16", precision, memory_format=f, **device)
            for f in ("contiguous", "channels_last")
        )
        return total_s(usual.forward) - total_s(last.forward)

    assert more_s("amp-bf16") == pytest.approx(turned_s(2))
    assert more_s("tf32") == pytest.approx(turned_s(4))
    contiguous = modelled("vgg16", "amp-bf16", memory_format="contiguous")
    assert modelled("vgg16", "amp-bf16").forward == contiguous.forward
    assert more_s("fp32", preset="v100-sxm-32gb") < 0


def test_compiled_models_move_less_beside_matrix_products() -> None:
    """A quarter of it, or 0.6 beside batch norms, and convolutions are channels last anyway."""
    for name, left, options in (
        ("gpt2", 0.25, {}),
        ("resnet50", 0.6, {"memory_format": "channels_last"}),
    ):
        plain = modelled(name, "amp-bf16", **options)
        compiled = modelled(name, "amp-bf16", compile=True)
        of_others = [(a, b) for a, b in zip(plain.forward, compiled.forward, strict=True) if a != b]
        assert min(b.device_s / a.device_s for a, b in of_others) >= left - 1e-9
        assert total_s(compiled.forward) < total_s(plain.forward)
        assert compiled.optimizer == plain.optimizer


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("bert-base", {"memory_format": "channels_last"}, "bert-base is no convolutional network"),
        ("vit_b_16", {"memory_format": "channels_last"}, "vit_b_16 is no convolutional network"),
        ("resnet50", {"attention": "eager"}, "resnet50 has no attention"),
    ],
)
def test_an_option_of_layers_that_a_model_has_not(
    name: str, option: dict[str, Any], said: str
) -> None:
    with pytest.raises(ScenarioError, match=said):
        modelled(name, "amp-bf16", **option)


@pytest.mark.parametrize(
    ("name", "moved"), [("adam", (72, 84)), ("adamw", (72, 80)), ("sgd", (12, 24))]
)
def test_weight_decay_moves_what_torch_adds(name: Any, moved: tuple[int, int]) -> None:
    """Bytes an element of fp32: Adam adds the parameters to its gradients, AdamW scales them."""
    scenario = load_scenario(cluster_of_one("a100-sxm-80gb"))
    device = scenario.cluster.device
    parameters = [Parameter("weight", 10**8, "float32")]
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    for decay, per_element in zip((0.0, 0.01), moved, strict=True):
        work = optimizer_work(Optimizer(name=name, weight_decay=decay), parameters, device)
        assert work.device_s == pytest.approx(per_element * 10**8 / rate)


@pytest.mark.parametrize(
    ("options", "moved", "operations"),
    [
        ({"name": "sgd"}, 12, 1),
        ({"name": "sgd", "momentum": 0.9}, 12 + 8 + 12, 3),  # the momentum is scaled, then added to
        ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}, 12 + 8 + 12 + 12, 4),
        ({"name": "adam"}, 72, 7),
        ({"name": "adamw", "weight_decay": 0.1}, 72 + 8, 8),
        ({"name": "sgd", "fused": True}, 12, 1),
        ({"name": "sgd", "fused": True, "momentum": 0.9}, 12 + 8, 1),  # read and written once more
        ({"name": "adamw", "fused": True, "weight_decay": 0.1}, 28, 1),
    ],
    ids=str,
)
def test_an_optimizer_moves_its_bytes_in_launches_of_64_tensors(
    options: dict[str, Any], moved: int, operations: int
) -> None:
    """130 tensors take three launches an operation, none of them shorter than the floor."""
    device = load_scenario(cluster_of_one("a100-sxm-80gb")).cluster.device
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    for numel in (10**6, 1):
        parameters = [Parameter(f"weight{i}", numel, "float32") for i in range(130)]
        work = optimizer_work(Optimizer(**options), parameters, device)
        assert work.kernels == 3 * operations
        bytes_s, floors_s = moved * 130 * numel / rate, 3 * operations * device.kernel_floor_s
        assert work.device_s == pytest.approx(max(bytes_s, floors_s))


@pytest.mark.parametrize(
    "options",
    [{"name": "sgd"}, {"name": "sgd", "momentum": 0.9}, {"name": "adam"}, {"name": "adamw"}],
    ids=str,
)
def test_an_optimizer_keeps_what_torchs_keeps(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="its optimizers are the oracle")
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    kept = {key: value for key, value in options.items() if key != "name"}
    name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[options["name"]]
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **kept)
    optimizer.step()
    tensors = [t for t in optimizer.state[weight].values() if torch.is_tensor(t) and t.numel() > 1]
    parameters = [Parameter("weight", 1000, "float32")]
    assert optimizer_state_bytes(Optimizer(**options), parameters) == 4000 * len(tensors)


# --- the host's time ----------------------------------------------------------------------------


def operators_and_kernels(model: Model) -> tuple[int, int]:
    """Count those of forward and backward, at an A100's 45 us an operator."""
    works = (*model.forward, *model.backward)
    return round(sum(work.host_s for work in works) / 40e-6), sum(work.kernels for work in works)


def test_the_host_takes_its_time_for_every_operator() -> None:
    """ResNet-50, whatever the batch (docs/explanation/compute.md); kernels alone turn layouts."""
    usual = modelled("resnet50", "amp-bf16")
    assert operators_and_kernels(usual) == (573, 890)
    assert usual.host_s - usual.optimizer.host_s == pytest.approx(27.37e-3, abs=0.05e-3)
    assert operators_and_kernels(modelled("resnet50", "amp-bf16", batch_per_rank=1)) == (573, 890)
    in_full = operators_and_kernels(modelled("resnet50", "fp32"))
    # casts of 53 weights and of the head's two, and back; of the image, of the head's output and
    # back; TF32 turns layouts too
    assert in_full == (573 - 2 * 55 - 3, 890 - 2 * 55 - 3)
    channels_last = modelled("resnet50", "amp-bf16", memory_format="channels_last")
    assert operators_and_kernels(channels_last) == (573, 573)


def test_written_out_attention_is_more_operators() -> None:
    fused, written_out = (
        operators_and_kernels(modelled("bert-base", "fp32", attention=attention))[0]
        for attention in ("sdpa", "eager")
    )
    assert written_out == fused + 12 * (5 + 6)  # layers, forward and backward


def test_compiled_code_and_cpus_have_no_operators() -> None:
    assert operators_and_kernels(modelled("resnet50", "fp32", compile=True))[0] == 0
    on_cpu = cluster_of_one("cpu-core") | {"ddp": {"backend": "gloo"}}
    scenario = load_scenario(on_cpu)
    model = zoo_model(model_table("resnet50"), scenario.workload, scenario.cluster.device)
    assert operators_and_kernels(model)[0] == 0


def test_a_measured_step_says_nothing_of_its_host() -> None:
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": "a100-sxm-80gb"}
    for source in ({"model": "resnet50"}, {"parameters": "scenarios/own-model-parameters.csv"}):
        workload = source | {"batch_per_rank": 32, "step_time": "40 ms"}
        scenario = load_scenario({"schema": "ddpsim/1", "workload": workload, "cluster": cluster})
        works = build_model(scenario)
        every = (*works.forward, *works.backward, works.optimizer)
        assert not any(work.host_s for work in every)


def test_the_optimizers_python_is_of_the_host() -> None:
    device = load_scenario(cluster_of_one("a100-sxm-80gb")).cluster.device
    listed = [Parameter("any", 1, "float32")] * 100
    taken_us = {
        (name, fused): 1e6
        * optimizer_work(Optimizer(name=name, fused=fused), listed, device).host_s
        for name in ("sgd", "adamw")
        for fused in (False, True)
    }
    assert {key: round(us) for key, us in taken_us.items()} == {
        ("sgd", False): 300,
        ("sgd", True): 100,
        ("adamw", False): 900,
        ("adamw", True): 300,
    }


def test_stretched_times() -> None:
    """An estimate's device by itself; a measured step's with its launches."""
    estimated = modelled("resnet50", "fp32")
    for model, host in ((estimated, 1), (replace(estimated, basis="measured"), 2)):
        longer = model.stretched(2)
        assert total_s(longer.backward) == pytest.approx(2 * total_s(model.backward))
        assert longer.host_s == pytest.approx(host * model.host_s)


def test_masters_are_copied_from_and_to() -> None:
    """2 + 2 bytes a parameter and gradient in 16 bits, and 12 of the optimizer's."""
    parameters = [Parameter("a", 2**20, "bfloat16")]
    masters = Optimizer(name="adamw", masters=True)
    assert optimizer_state_bytes(masters, parameters) == 12 * 2**20
    copied = moved_bytes(masters, parameters) - moved_bytes(
        Optimizer(name="adamw"), [Parameter("a", 2**20, "float32")]
    )
    assert copied == (2 + 4 + 4 + 2) * 2**20


def test_moments_of_one_byte_take_what_torchao_makes() -> None:
    """Bytes of a moment that torchao 0.18's AdamW8bit makes, by hand; the others are of float32."""
    optimizer = Optimizer(name="adamw", state_bits=8)
    sizes = ((100, 400), (257000, 1028000), (64 * 64, 5184), (512 * 300, 157024))
    for numel, moment_bytes in sizes:
        parameter = Parameter("a", numel, "float32")
        assert optimizer_state_bytes(optimizer, [parameter]) == 2 * moment_bytes
    device = load_scenario("scenarios/checkpointing.yaml").cluster.device
    whole, small = (
        optimizer_work(Optimizer(name="adamw", state_bits=bits), [parameter] * 3, device)
        for bits in (32, 8)
    )
    assert small.device_s < whole.device_s / 2
    assert small.kernels == 3
