"""Variants of rounds, as users write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from calibrate.cli_options import variants_of
from calibrate.measure.errors import MeasureError
from calibrate.records.record import Layout
from calibrate.records.variant import Variant
from ddpsim.errors import InputError

torch = pytest.importorskip("torch", reason="torch is not installed: nothing can be measured")


def test_a_variant_is_written_with_keys_of_a_ddp_section() -> None:
    texts = [
        "strategy=fully_shard, reshard_after_forward=false, units=[first, second]",
        "strategy=hsdp, units={min_parameters: 100}",
        "bucket_cap_mb=5",
    ]
    assert variants_of(texts) == [
        Variant(strategy="fully_shard", reshard_after_forward=False, units=("first", "second")),
        Variant(strategy="hsdp", units={"min_parameters": 100}),
        Variant(bucket_cap_mb=5),
    ]
    assert variants_of(["bucket_cap_mb=default"]) == [Variant()]
    usual = ["strategy=hsdp,reshard_after_forward=default"]
    assert variants_of(usual) == [Variant(strategy="hsdp")]
    assert variants_of(None) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strategy=nave", "strategy 'nave' is unknown. Did you mean 'naive'? Wanted: ddp, naive,"),
        ("bucket_cap_mb=5,bucket_cap_mb=25", "bucket_cap_mb is given twice; keep one of them"),
        ("bucket_cap_mb=5,bucket_cap_mb=default", "bucket_cap_mb is given twice; keep one"),
        ("bucket_cap_mb=0", "bucket_cap_mb '0' is out of range: wanted greater than 0"),
        ("no_sync=maybe", "no_sync wanted true or false, got 'maybe'"),
        ("fully_shard", "'fully_shard' has no value; write KEY=VALUE"),
        (
            "nosync=false",
            "nosync is no key of a variant. Did you mean 'no_sync'? Known:",
        ),
        ("strategy=naive,bucket_cap_mb=5", "naive has no bucket_cap_mb, an option of DDP;"),
        (
            "reshard_after_forward=false",
            "ddp has no reshard_after_forward; drop it, or write strategy=fully_shard",
        ),
        ("units=[a]", "ddp has no units; drop it, or write strategy=fully_shard"),
        ("strategy=fully_shard,units=layers", "units 'layers' is no choice of units; write blocks"),
        ("strategy=fully_shard,units=[a", "units is no YAML; write [layers.0, layers.1]"),
        (
            "matrix_approximation_rank=2",
            "none has no matrix_approximation_rank; drop it, or write comm_hook=powerSGD",
        ),
        ("overlap_with_ddp=true", "ddp has no overlap_with_ddp; drop it, or write strategy=zero1"),
        ("strategy=zero1,shard_buckets=true", "need overlap_with_ddp=true; write it too"),
        (
            "strategy=zero1,overlap_with_ddp=true,find_unused_parameters=true",
            "overlap_with_ddp never updates under find_unused_parameters; drop one",
        ),
        ("no_sync=false", "ddp reduces once in this step, without no_sync too"),
    ],
)
def test_a_variant_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        variants_of([text])
    assert message in str(refused.value)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        *(f"strategy={name}" for name in ("fsdp", "fsdp2", "zero", "zero2", "zero3", "hybrid")),
        *("reshard_after_forward=false", "units=blocks,strategy=fsdp_2", "shard_buckets=true"),
    ],
)
def test_what_a_refusal_tells_to_write_is_taken(text: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        variants_of([text])
    told = re.findall(r"write ([\w=,]+)", str(refused.value))
    assert told
    kept = text if "drop it" in str(refused.value) else ""
    assert variants_of([",".join(filter(None, [kept, told[0]]))])


def test_a_variant_has_a_short_label() -> None:
    assert Variant().label == "default"
    assert Variant(bucket_cap_mb=25, accumulation_steps=2).label == "25 x2"
    assert Variant(comm_hook="fp16_compress").label == "default fp16_compress"
    assert Variant(comm_hook="powerSGD").label == "default powerSGD rank 1"
    synced = Variant(strategy="zero1", bucket_cap_mb=5, accumulation_steps=2, no_sync=False)
    assert synced.label == "zero1 5 x2 synced"
    assert Variant(strategy="fully_shard", reshard_after_forward=False).label == "fully_shard keep"
    assert Variant(strategy="fsdp1", reshard_after_forward=False).label == "fsdp1 keep"
    assert Variant(strategy="hsdp", units=("a", "b")).label == "hsdp 2 units"
    hook = "hook_with_zero_step_interleaved"
    interleaved = Variant(strategy="zero1", overlap_with_ddp=True, hook=hook, shard_buckets=True)
    assert interleaved.label == "zero1 interleaved in shards"


def test_only_caps_are_choices_of_buckets() -> None:
    assert Variant(bucket_cap_mb=5).is_bucket_choice
    assert not Variant(gradient_as_bucket_view=True).is_bucket_choice
    assert not Variant(strategy="zero1").is_bucket_choice


def test_hsdp_needs_several_ranks_on_several_nodes() -> None:
    from calibrate.measure.ddp.loops import mesh_of

    with pytest.raises(MeasureError, match=r"1 x 2 ranks leave one of the two out: start several"):
        mesh_of("cpu", Variant(strategy="hsdp"), Layout(nodes=1, gpus_per_node=2))


def test_power_sgd_with_gloo_needs_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """38 kB in buckets of 4: two hooks' collectives would cross."""
    from calibrate.measure.ddp.loops import check_power_sgd
    from calibrate.measure.model.training import prepare

    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    bare = prepare("measure_helpers:two_layers", 4, torch.device("cpu"), "sgd", fused=False)
    variant = Variant(comm_hook="powerSGD", bucket_cap_mb=0.004)
    with pytest.raises(MeasureError, match=r"cross; put all in one, with bucket_cap_mb=1$"):
        check_power_sgd(bare, variant)
    check_power_sgd(bare, Variant(comm_hook="powerSGD"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_units_are_those_of_the_variant(one_rank: None) -> None:
    from calibrate.measure.ddp.loops import loop_of
    from calibrate.measure.model.training import prepare

    bare = prepare("measure_helpers:two_layers", 4, torch.device("cpu"), "sgd", fused=False)
    layout = Layout(nodes=1, gpus_per_node=1)
    for units, sharded in ((("0",), ["0"]), (("0", "2"), ["0", "2"]), ((), []), ("blocks", [])):
        loop = loop_of(bare, Variant(strategy="fully_shard", units=units), layout)
        modules = loop.training.model.named_modules()
        assert [name for name, each in modules if name and hasattr(each, "unshard")] == sharded
        assert list(loop.units) == sharded
    with pytest.raises(InputError, match="'layer' holds no parameter: name a module of this mod"):
        loop_of(bare, Variant(strategy="fully_shard", units=("layer",)), layout)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # of one rank
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
def test_units_of_fsdp1_are_flat_parameters(one_rank: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from calibrate.measure.ddp.loops import loop_of
    from calibrate.measure.model.training import prepare

    bare = prepare("measure_helpers:two_layers", 4, torch.device("cpu"), "sgd", fused=False)
    layout = Layout(nodes=1, gpus_per_node=1)
    for units, names in ((("0",), ["0"]), (("0", "2"), ["0", "2"]), ((), []), ("blocks", [])):
        loop = loop_of(bare, Variant(strategy="fsdp1", units=units), layout)
        whole = loop.training.model
        assert list(loop.units) == names
        assert len(FullyShardedDataParallel.fsdp_modules(whole)) == len(names) + 1
        loop.training.forward().backward()
        loop.training.optimizer.step()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_zero1_updates_in_ddps_hook_from_the_third_step_on(
    optimizer: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL; gloo is refused in torch's words."""
    from calibrate.measure.ddp.loops import loop_of
    from calibrate.measure.model.training import prepare

    bare = prepare("measure_helpers:two_layers", 4, torch.device("cpu"), optimizer, fused=False)
    variant, layout = (
        Variant(strategy="zero1", overlap_with_ddp=True),
        Layout(nodes=1, gpus_per_node=1),
    )
    with pytest.raises(MeasureError, match="torch: Gloo backend using Overlapping DDP with ZeRO"):
        loop_of(bare, variant, layout)
    monkeypatch.setattr("torch.distributed.get_backend", lambda *_: "nccl")
    training = loop_of(bare, variant, layout).training
    changed = []
    for _ in range(4):
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.forward().backward()
        training.optimizer.step()
        changed.append(not all(map(torch.equal, before, training.model.parameters())))
    assert changed == [False, False, True, True]
