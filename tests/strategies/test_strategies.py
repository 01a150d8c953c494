"""What strategies of data parallelism cost, in theory and on the shipped scenarios."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from changed_documents import document
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs.random_jobs import models
from jobs.simulated_jobs import simulated
from outcome import Outcome
from shipped_scenarios import load, predict, suggested

import ddpsim
from ddpsim.errors import DdpsimError
from ddpsim.planning.compare import compare, each_flag, each_strategy
from ddpsim.planning.explain import explain_step
from ddpsim.planning.tune import TuneError, tune
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import steps_of
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp
from ddpsim.strategies.instructions import Communicate
from ddpsim.workload.model import Model

ROOT = Path(__file__).resolve().parent.parent.parent
_PRINTED: dict[tuple[str, ...], str] = {}
BF16 = "workload.precision=amp-bf16"  # float16 has a GradScaler, which waits for the device
SHARDED = [f"ddp.strategy={name}" for name in ("zero1", "fully_shard", "hsdp")]
NAIVE, FLAT, PER_PARAMETER = (
    f"ddp.strategy={name}" for name in ("naive", "naive_flat", "per_parameter")
)


def local(every: int) -> tuple[str, str]:
    return "ddp.strategy=local_sgd", f"ddp.local_sgd.every={every}"


def on_links(strategy: str, latency_us: int, ranks: int, **ddp: Any) -> Scenario:
    """Ranks on links with latency, whose all-reduce is a ring with one protocol for all sizes."""
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 1},
            "ddp": {"strategy": strategy, **ddp},
            "cluster": {
                "nodes": ranks,
                "gpus_per_node": 1,
                "device": "a100-sxm-40gb",
                "algorithm": "ring",
                "protocol": "Simple",
                "inter_node": {"bandwidth": "5 GB/s", "latency": f"{latency_us} us"},
            },
            "run": {"iterations": 2},
        }
    )


def last_step(strategy: str, model: Model, latency_us: int, ranks: int) -> Any:
    done = simulated(on_links(strategy, latency_us, ranks), model)
    return steps_of(done.timeline.slowest)[-1]


@settings(max_examples=100)
@given(models(), st.integers(20, 500), st.integers(2, 5))
def test_one_by_one_never_communicates_for_less_than_all_at_once(
    model: Model, latency_us: int, ranks: int
) -> None:
    """Every all-reduce pays the latency of its hops again; the bytes are the same."""
    naive, flat = (last_step(name, model, latency_us, ranks) for name in ("naive", "naive_flat"))
    assert len(flat.comm) == 1
    assert len(naive.comm) == len(model.used)
    sent_bytes = [sum(span.wire_bytes for span in step.comm) for step in (naive, flat)]
    assert sent_bytes[0] == sent_bytes[1]
    hops_ns = 2 * (ranks - 1) * latency_us * 1000
    assert naive.comm_ns() >= flat.comm_ns() + (len(model.used) - 1) * hops_ns * 0.99


def test_buckets_by_hand_are_reduced_after_the_backward() -> None:
    """Two of ResNet-50's 102 MB, cut where torch would cut its parameters in registration order."""
    one, two = (predict("naive-vs-ddp", FLAT, *caps) for caps in ((), ("ddp.bucket_cap_mb=60",)))
    assert [len(each.buckets) for each in (one, two)] == [1, 2]
    first, second = two.buckets
    assert (first.first, second.last) == ("conv1.weight", "fc.bias")
    assert first.size_bytes >= 60 * 2**20 > first.size_bytes - 2048 * 512 * 9 * 4
    assert first.size_bytes + second.size_bytes == one.buckets[0].size_bytes
    assert two.overlap_fraction == 0
    assert two.comm_time_s > one.comm_time_s


def test_groups_are_sent_in_their_order() -> None:
    """Groups of a cap, the other way round: each tensor is as long, the times are the same."""
    capped = predict("naive-vs-ddp", FLAT, "ddp.bucket_cap_mb=60")
    names = [parameter.name for parameter in resolve(load("naive-vs-ddp")).model.parameters]
    cut = names.index(capped.buckets[1].first)
    groups = json.dumps([names[cut:], names[:cut]])
    by_hand = predict("naive-vs-ddp", FLAT, f"ddp.bucket_groups={groups}")
    assert [(b.first, b.size_bytes) for b in by_hand.buckets] == [
        (b.first, b.size_bytes) for b in capped.buckets[::-1]
    ]
    assert by_hand.iteration_time_s == capped.iteration_time_s


def test_what_ddp_has_reduced_is_sent_twice() -> None:
    """Hooks wait behind DDP's buckets, so that less is hidden than beside a loop afterwards."""
    name = "resnet50-2x8-25gbit"
    once = predict(name)
    sent = sum(each.size_bytes for each in resolve(load(name)).sent)
    for place in ("hooks", "after_backward"):
        twice = predict(name, f"ddp.reduced_again={place}")
        step = resolve(load(name, f"ddp.reduced_again={place}")).program.steady_step
        again = [i for i in step if isinstance(i, Communicate) and "beside DDP's" in i.cause]
        assert sum(each.size_bytes for each in again) == sent
        assert len(twice.buckets) == len(once.buckets)
        assert twice.exposed_comm_s > 1.5 * once.exposed_comm_s
        assert "gradients that are reduced beside DDP" in twice.bottleneck.text


def test_hooks_of_ones_own_reduce_under_no_sync_too() -> None:
    settings = ("ddp.accumulation_steps=3", "ddp.reduced_again=hooks")
    job = resolve(load("resnet50-2x8-25gbit", *settings))
    sent = [i for i in job.program.steady_step if isinstance(i, Communicate)]
    assert sum("beside DDP's" in each.cause for each in sent) == 3 * len(job.model.ready_order)


def test_a_barrier_holds_the_host_at_the_end_of_its_steps() -> None:
    job = resolve(load("resnet50-2x8-25gbit", "workload.barrier_every=3"))
    steps = [job.program.steady().step(number) for number in range(3)]
    ends = [[type(i).__name__ for i in step[-4:]] for step in steps]
    held = ["Communicate", "Await", "Synchronize", "Mark"]
    assert ends.count(held) == 1


def test_what_is_sent_for_nothing_is_taken_back_in_a_comparison() -> None:
    added = ("workload.barrier_every=1", "ddp.reduced_again=hooks")
    flags = [option.settings for option in each_flag(document("resnet50-2x8-25gbit", *added))]
    assert ("ddp.reduced_again=null",) in flags
    assert ("workload.barrier_every=null",) in flags
    assert "ddp.reduced_again=null" in each_strategy_settings(*added)


def each_strategy_settings(*added: str) -> set[str]:
    options = each_strategy(document("resnet50-2x8-25gbit", *added))
    return {setting for option in options for setting in option.settings}


@settings(max_examples=100)
@given(models(), st.integers(200, 500), st.integers(3, 5))
def test_a_naive_step_is_never_faster_than_a_flat_one(
    model: Model, latency_us: int, ranks: int
) -> None:
    """From two gradients on; copies into one tensor take less than a hop here."""
    naive, flat = (last_step(name, model, latency_us, ranks) for name in ("naive", "naive_flat"))
    assert len(model.used) == 1 or naive.length_ns >= flat.length_ns


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("accumulation", ()),
        ("gloo-cpu", ()),
        ("own-model", ()),
        ("resnet50-2x8-25gbit", ()),
        ("straggler", ("workload.model=resnet18", "workload.step_time=60 ms")),
    ],
)
def test_ddp_is_no_slower_than_a_naive_loop_on_shipped_scenarios(
    name: str, settings: tuple[str, ...]
) -> None:
    """Micro-batches, gloo, one's own times, two nodes, and ranks that are not alike."""
    usual = (*settings, "ddp.bucket_cap_mb=default", "run.iterations=1")
    ddp, naive, flat, hooks = (
        predict(name, *usual, *s) for s in ((), (NAIVE,), (FLAT,), (PER_PARAMETER,))
    )
    assert ddp.iteration_time_s.mean <= naive.iteration_time_s.mean
    assert flat.iteration_time_s.mean <= naive.iteration_time_s.mean
    assert naive.overlap_fraction == flat.overlap_fraction == 0
    assert hooks.overlap_fraction is not None
    assert hooks.overlap_fraction > 0
    assert hooks.exposed_comm_s < naive.exposed_comm_s


def sent_bytes(scenario: Scenario, steps: int) -> int:
    program = resolve(scenario).program
    launched = (i for number in range(steps) for i in program.steady().step(number))
    return sum(i.size_bytes for i in launched if isinstance(i, Communicate))


@pytest.mark.parametrize("every", [2, 3, 8])
def test_local_sgd_sends_one_part_in_h_of_the_bytes(every: int) -> None:
    steps = 5 * every
    all_bytes, few_bytes = (
        sent_bytes(load("resnet50-8xa100", *local(n)), steps) for n in (1, every)
    )
    assert all_bytes == every * few_bytes
    flat_bytes = sent_bytes(load("resnet50-8xa100", FLAT), steps)
    assert all_bytes == flat_bytes


def test_the_mean_of_local_sgd_has_whole_periods() -> None:
    """20 iterations asked for, 21 simulated: 7 of 3 with an average in each."""
    scenario = load("resnet50-8xa100", *local(3), "run.iterations=20", BF16)
    assert resolve(scenario).program.iterations == 21
    result = ddpsim.simulate(scenario)
    timeline = ddpsim.observe(scenario)
    ends = timeline.slowest.step_ends_ns
    lengths = [b - a for a, b in pairwise(ends)][-21:]
    assert sum(length > min(lengths) for length in lengths) == 7
    assert result.iteration_time_s.mean == pytest.approx(sum(lengths) / 21 / 1e9, rel=1e-12)
    assert resolve(scenario).step_s() == pytest.approx(result.iteration_time_s.mean, rel=1e-9)
    assert result.prediction_interval_s is not None
    assert "jitter" not in [source.input for source in result.prediction_interval_s.sources]
    assert [(c.operation, c.cause) for c in result.collectives] == [
        ("all_reduce", "average of the parameters")
    ]


def test_without_no_sync_every_micro_batch_reduces() -> None:
    quiet, synced = (predict("accumulation", *s) for s in ((), ("ddp.no_sync=false",)))
    reductions = [
        [c.size_bytes for c in result.collectives if c.operation == "all_reduce"]
        for result in (quiet, synced)
    ]
    assert reductions[1] == 4 * reductions[0]
    assert [bucket.size_bytes for bucket in synced.buckets] == reductions[0]
    assert synced.comm_time_s > 3.9 * quiet.comm_time_s
    assert synced.iteration_time_s.mean > quiet.iteration_time_s.mean


def test_no_sync_makes_no_difference_without_accumulation() -> None:
    one, other = (predict("resnet50-2x8-25gbit", *s) for s in ((), ("ddp.no_sync=false",)))
    assert one == other


def test_collectives_are_listed_in_launch_order() -> None:
    scenario = load("naive-vs-ddp")
    listed = ddpsim.simulate(scenario).to_dict()["collectives"]
    model = resolve(scenario).model
    assert [each["cause"] for each in listed] == [f"parameter {p.name}" for p in model.parameters]
    assert [each["size_bytes"] for each in listed] == [p.size_bytes for p in model.parameters]
    assert {(each["operation"], each["group"]) for each in listed} == {("all_reduce", "0-15")}
    for before, after in pairwise(listed):
        assert before["ready_s"] <= before["start_s"] < before["end_s"] <= after["ready_s"]


def test_collectives_of_ddp_name_buckets_and_buffers() -> None:
    result = predict("gloo-cpu")
    causes = [each.cause for each in result.collectives]
    buckets = [f"bucket {bucket.index}" for bucket in result.buckets]
    assert [cause for cause in causes if cause != "buffers"] == buckets
    assert all(each.ready_s >= 0 for each in result.collectives)
    found = predict("data-parallel").collectives
    assert [each.cause for each in found] == ["inputs", "parameters and buffers", "gradients"]


def of_naive_vs_ddp(cli: Callable[..., Outcome], *options: str) -> str:
    """What `run` prints, which two tests read."""
    if options not in _PRINTED:
        _PRINTED[options] = cli("run", str(ROOT / "scenarios" / "naive-vs-ddp.yaml"), *options).out
    return _PRINTED[options]


def test_verbose_shows_the_first_ten_collectives(cli: Callable[..., Outcome]) -> None:
    short, whole = of_naive_vs_ddp(cli), of_naive_vs_ddp(cli, "--verbose")
    listed = predict("naive-vs-ddp").collectives
    *above, title = whole.split("  operation ")
    rows = title.splitlines()[1:11]
    assert [row.split("0-15")[1].strip() for row in rows] == [c.cause for c in listed[:10]]
    assert f"{len(listed) - 10} more" in title.splitlines()[11]
    assert len(above) == 1
    assert short.split("\n\n")[:2] == above[0].split("\n\n")[:2]


def test_verbose_shows_sources_whole(cli: Callable[..., Outcome]) -> None:
    short, whole = (" ".join(of_naive_vs_ddp(cli, *o).split()) for o in ((), ("--verbose",)))
    result = predict("naive-vs-ddp")
    sources = [entry.source for entry in result.provenance]
    sources += [s.basis for s in result.prediction_interval_s.sources if s.low_s or s.high_s]
    assert all(" ".join(source.split()) in whole for source in sources)
    assert not all(" ".join(source.split()) in short for source in sources)


def test_each_strategy_is_compared_with_ddp() -> None:
    few = ("ddp.accumulation_steps=2", "workload.model=resnet18", "run.iterations=2")
    base = document("naive-vs-ddp", *few)
    plain = document("naive-vs-ddp", *few, *as_ddp(parse(base).ddp))
    changes = {c.title: c for c in compare(parse(plain), each_strategy(plain)).changes}
    kept = ", reshard_after_forward="
    assert list(changes) == [
        *("naive", "naive_flat", "per_parameter", "parameter_server", "local_sgd, every=4"),
        *("zero1", "zero1, hook_with_zero_step", "zero1, hook_with_zero_step_interleaved"),
        *("deepspeed, stage=1", "deepspeed, stage=2"),
        *(f"deepspeed, stage={stage}, params=bfloat16" for stage in (1, 2)),
        *("fully_shard", f"fully_shard{kept}false", f"fully_shard{kept}8"),
        *("hsdp", f"hsdp{kept}false"),
    ]
    first = ddpsim.simulate(parse(plain)).iteration_time_s.mean
    for change in changes.values():
        alone = predict("naive-vs-ddp", *few, *change.settings)
        assert change.problem is None
        assert change.change_s == pytest.approx(alone.iteration_time_s.mean - first, rel=1e-9)


def test_data_parallel_says_which_options_it_has_not() -> None:
    settings = ("ddp.bucket_cap_mb=5", "ddp.no_sync=false", "run.iterations=1")
    (told,) = (w for w in predict("data-parallel", *settings).warnings if "no effect" in w)
    assert told.startswith("ddp.bucket_cap_mb, ddp.no_sync have no effect: DataParallel has none")
    assert not any("no effect" in w for w in predict("data-parallel", settings[2]).warnings)


def test_each_strategy_leaves_ddps_options_out() -> None:
    options = ("ddp.comm_hook=fp16_compress", "ddp.bucket_cap_mb=5", "ddp.no_sync=false")
    options += (
        "workload={model: resnet18, batch_per_rank: 16, precision: amp-fp16}",
        "run.iterations=2",
    )
    base = document("accumulation", *options)
    changes = compare(parse(base), each_strategy(base)).changes
    problems = {change.title: change.problem for change in changes if change.problem}
    assert [*problems] == ["deepspeed, stage=1", "deepspeed, stage=2"]
    assert all("DeepSpeed scales the loss itself" in problem for problem in problems.values())
    hooks = next(change for change in changes if change.title == "per_parameter")
    assert "ddp.no_sync=true" not in hooks.settings
    with pytest.raises(DdpsimError, match="data_parallel is a strategy of its own"):
        list(each_strategy(document("data-parallel")))


def test_compare_prints_every_strategy(cli: Callable[..., Outcome]) -> None:
    file = str(ROOT / "scenarios" / "naive-vs-ddp.yaml")
    few = ("--set", "workload.model=resnet18", "--set", "run.iterations=1")
    done = cli("compare", file, *few, "--each-strategy", "--json")
    titles = [change["title"] for change in json.loads(done.out)["changes"]]
    assert done.code == 0
    assert titles[:3] == ["naive", "naive_flat", "per_parameter"]


@pytest.mark.parametrize("settings", [(FLAT,), (PER_PARAMETER,), (NAIVE,)])
def test_ddp_is_suggested_in_place_of_a_loop(settings: tuple[str, ...]) -> None:
    settings = (*settings, "cluster.inter_node.bandwidth=25 Gbit/s")
    proposed = suggested("naive-vs-ddp", *settings)
    assert "ddp.strategy=ddp" in proposed
    assert not any(each.startswith(("ddp.bucket", "ddp.comm", "ddp.gra")) for each in proposed)


def test_explanations_say_what_a_strategy_does() -> None:
    base = document("naive-vs-ddp", "workload.model=resnet18", "run.iterations=2")
    assert next(each.settings for each in each_flag(base)) == ("ddp.strategy=ddp",)
    explained = explain_step(base)
    words = [phase.text for phase in explained.phases]
    assert "all-reduces of gradients, one after another" in words
    assert not any("bucket" in each for each in words)
    assert "gradients end after the backward" in explained.result.bottleneck.text
    assert explained.helps[0].settings[0] == "ddp.strategy=ddp"


def test_what_is_about_buckets_refuses_other_strategies() -> None:
    with pytest.raises(TuneError, match="naive has no buckets to tune"):
        tune(document("naive-vs-ddp"))
    key = "ddp.deepspeed.reduce_bucket_size=10000000,40000000,"
    with pytest.raises(TuneError, match=f"no bucket_cap_mb to tune; .* sweep FILE --set {key}"):
        tune(document("llama-3b-deepspeed"))


def test_memory_of_strategies() -> None:
    ddp, naive, flat = (
        predict("resnet50-8xa100", *s).memory_bytes_per_gpu for s in ((), (NAIVE,), (FLAT,))
    )
    assert naive.buckets == 0
    assert flat.buckets == flat.gradients == ddp.buckets
    view = "ddp.gradient_as_bucket_view=true"
    kept, moved = (
        predict("accumulation", view, f"ddp.no_sync={n}").memory_bytes_per_gpu.gradients
        for n in ("true", "false")
    )
    assert kept > moved == 0


def test_a_compiled_graph_is_split_for_ddp_alone() -> None:
    ddp, hooks = (
        predict("resnet50-8xa100", "workload.compile=true", *s) for s in ((), (PER_PARAMETER,))
    )
    assert ddp.overlap_fraction is not None
    assert ddp.overlap_fraction > 0
    assert hooks.overlap_fraction is not None
    assert hooks.overlap_fraction < 0.2 * ddp.overlap_fraction
