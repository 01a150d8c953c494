"""Real DDP iterations in rounds, measured without a testbed, and their file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from measured.rounds_jobs import VARIANTS, run_job, run_ranks

from calibrate.files import rescued
from calibrate.records.rounds import (
    ALONE_PER_ROUND,
    RoundOptions,
    Rounds,
    load_rounds,
    rank_medians,
    save_rounds,
    slowest,
)
from calibrate.records.variant import Variant
from calibrate.validate.validate import validate
from ddpsim.errors import ImportFailedError

pytest.importorskip("torch", reason="torch is not installed: nothing can be measured")

pytestmark = pytest.mark.usefixtures("warm_python")

STRATEGIES = (
    Variant(strategy="naive"),
    Variant(strategy="naive_flat"),
    Variant(strategy="per_parameter", accumulation_steps=2),
    Variant(strategy="zero1"),
    Variant(strategy="fully_shard", units=("0", "2")),
    Variant(strategy="fully_shard", reshard_after_forward=False, accumulation_steps=2),
    Variant(comm_hook="powerSGD", matrix_approximation_rank=2),
    Variant(accumulation_steps=2, no_sync=False),
)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    path = tmp_path_factory.mktemp("rounds") / os.fsdecode(b"caf\xe9.json")  # no UTF-8
    options = RoundOptions(
        output=path,
        model="measure_helpers:two_layers",
        batch=8,
        variants=VARIANTS + STRATEGIES,
        rounds=(3, 3),
        line_rate_bytes_per_s=1e9,
    )
    for ended in run_ranks(options):
        assert ended.returncode == 0, ended.stderr
    return load_rounds(path)


def test_a_round_holds_every_variant_of_every_rank(rounds: Rounds) -> None:
    assert rounds.layout.world_size == 2
    assert rounds.layout.line_rate_bytes_per_s == 1e9
    assert rounds.batch_per_rank == 8
    assert tuple(v.variant for v in rounds.variants) == VARIANTS + STRATEGIES
    count = len(rounds.alone.hooked_backward_s)
    assert count == 3
    for steps in (rounds.alone, *rounds.variants):
        iterations = count * (ALONE_PER_ROUND if steps is rounds.alone else 1)
        for part in ("whole_s", "forward_s", "backward_s", "optimizer_s"):
            samples = getattr(steps, part)
            assert [len(row) for row in samples] == [2] * iterations
            assert all(seconds > 0 for row in samples for seconds in row)
    assert all(len(a.samples_s) == count for a in rounds.all_reduce)


def test_the_bare_model_also_accumulates(rounds: Rounds) -> None:
    two = rounds.alone.accumulating
    assert two is not None
    assert len(two.whole_s) == len(rounds.alone.whole_s)
    for whole, forward, backward in zip(two.whole_s, two.forward_s, two.backward_s, strict=True):
        assert all(f + b < w for w, f, b in zip(whole, forward, backward, strict=True))


def test_the_bare_backward_also_runs_beside_all_reduces(rounds: Rounds) -> None:
    """In turns with layers, as often as it runs alone, but where the all-reduces end before it."""
    found = rounds.alone.beside
    assert found
    for samples in (found.layers_s, found.layers_beside_s, found.backward_s):
        assert len(samples) == len(found.backward_beside_s) <= len(rounds.alone.whole_s)
        assert all(len(row) == 2 and min(row) > 0 for row in samples)


def test_the_parts_are_within_the_whole(rounds: Rounds) -> None:
    for steps in (rounds.alone, *rounds.variants):
        parts = zip(steps.forward_s, steps.backward_s, steps.optimizer_s, strict=True)
        for whole, rows in zip(steps.whole_s, parts, strict=True):
            for rank in (0, 1):
                assert sum(row[rank] for row in rows) <= whole[rank] + 3e-6  # rounded


def test_the_bare_optimizer_waits_and_the_wait_does_not_count(rounds: Rounds) -> None:
    """An all-reduce of 16 MiB takes tens of times as long as these two layers."""
    alone = rounds.alone
    parts = (alone.forward_s, alone.backward_s, alone.optimizer_s)
    added = map(sum, zip(*map(slowest, parts), strict=True))
    shares = sorted(whole / sum_ for whole, sum_ in zip(slowest(alone.whole_s), added, strict=True))
    assert shares[len(shares) // 2] < 3


def test_an_optimizer_finds_its_gradients_copied_back() -> None:
    """Out of buckets that were filled before the wait; what is sparse, or missing, as it was."""
    import torch

    from calibrate.measure.ddp.loops import ReducedAsByDdp
    from calibrate.measure.model.training import prepare

    for model in ("half_used", "of_sparse_gradients"):
        training = prepare(f"measure_helpers:{model}", 4, torch.device("cpu"), "sgd", fused=False)
        training.forward().backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        before = [gradient.clone() for gradient in gradients]

        def spoil(dense: Sequence[torch.Tensor] = dense) -> None:
            for gradient in dense:
                gradient.fill_(torch.nan)

        ReducedAsByDdp(training, spoil)(training)
        assert bool(dense) == (model == "half_used")
        for gradient, was in zip(gradients, before, strict=True):
            assert torch.equal(gradient.to_dense(), was.to_dense())


def test_copies_of_the_bare_model_take_turns(tmp_path: Path) -> None:
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:two_layers",
        batch=8,
        variants=VARIANTS,
        rounds=(2, 2),
    )
    module = """
import measured.quick_rounds
import calibrate.measure.ddp.rounds as m, calibrate.measure.ddp.loops as s
step, timed = s.step, []
m.step = s.step = lambda training, *others, **more: timed.append(id(training.model)) or step(
    training, *others, **more
)
m.measure_rounds(m.RoundOptions.model_validate_json(__import__("sys").argv[1]))
print(len(set(timed)))
"""
    for ended in run_job(["-c", module, options.model_dump_json()]):
        assert ended.stdout.split()[-1] == str(len(VARIANTS) + 2 * ALONE_PER_ROUND), ended.stderr


def test_buckets_are_those_that_ddp_logged(rounds: Rounds) -> None:
    """The rebuilt ones: 2.bias and 2.weight reach 4 kB first."""
    whole = 4 * sum(p.numel for p in rounds.parameters)
    assert [v.bucket_bytes for v in rounds.variants if v.logged] == [
        (whole,),
        (4 * (10 + 10 * 128), 4 * (128 + 128 * 64)),
        *[(whole,)] * 4,
    ]
    assert whole in [a.size_bytes for a in rounds.all_reduce]


def test_other_loops_say_what_they_reduce_together(rounds: Rounds) -> None:
    each = tuple(4 * p.numel for p in rounds.parameters)
    told = {v.variant.label: v.bucket_bytes for v in rounds.variants if not v.logged}
    assert told == {
        "naive": each,
        "naive_flat": (sum(each),),
        "per_parameter x2": each,
        "fully_shard 2 units": (),
        "fully_shard x2 keep": (),
    }
    units = {v.units for v in rounds.variants if not v.bucket_bytes}
    assert units == {("0", "2"), ()}  # single layers of a sequence are no blocks


def test_every_strategy_is_predicted(rounds: Rounds, tmp_path: Path) -> None:
    save_rounds(rounds, tmp_path / "rounds.json")
    (sweep,) = validate([tmp_path / "rounds.json"]).sweeps
    assert [case.variant for case in sweep.cases] == [v.label for v in VARIANTS + STRATEGIES]
    assert all(case.buckets_agree for case in sweep.cases)


def test_every_rank_says_what_ddps_hooks_take(rounds: Rounds) -> None:
    """To the nanosecond; one process group a rank."""
    hooks = [p.ddp_hook_s for p in rounds.parameters]
    assert [len(ranks) for ranks in hooks] == [2] * 4
    for rank in (0, 1):
        times = [ranks[rank] or 0.0 for ranks in hooks]
        assert min(times) > 0
        under_ddp = [row[rank] for row in rounds.alone.ddp_backward_s]
        assert len(under_ddp) == len(rounds.alone.whole_s)
        assert min(under_ddp) > 0


def test_gradients_are_ready_from_the_last_layer_to_the_first(rounds: Rounds) -> None:
    ready = {p.name: p.ready_s for p in rounds.parameters}
    assert set(ready) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for rank in (0, 1):
        last, first = ready["2.weight"][rank], ready["0.weight"][rank]
        assert last is not None
        assert first is not None
        assert 0 < last < first


def test_ddp_logged_the_same_iterations(rounds: Rounds) -> None:
    logged = rounds.variants[0].logged
    assert all(s > 0 for row in logged.comm_s for s in row)
    assert all(s > 0 for row in logged.forward_s for s in row)


def test_rounds_come_back_from_their_file(rounds: Rounds, tmp_path: Path) -> None:
    save_rounds(rounds, tmp_path / "again.json")
    assert load_rounds(tmp_path / "again.json") == rounds


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": "ddpsim.record/1"}')
    with pytest.raises(ImportFailedError, match=r"is no ddpsim\.ddp-rounds/1: schema"):
        load_rounds(path)
    with pytest.raises(ImportFailedError, match="cannot be read"):
        load_rounds(tmp_path / "missing.json")


def test_a_parameter_that_gets_no_gradient(tmp_path: Path) -> None:
    """DDP takes it where it is told to look for it; so does its simulation.

    What DDP ignores is not in its buckets.
    """
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:half_used",
        batch=8,
        variants=VARIANTS,
        rounds=(3, 3),
        optimizer="adamw",
    )
    for ended in run_ranks(options):
        assert ended.returncode == 3
        assert ended.stderr.strip().splitlines()[-1] == (
            "parameter idle.weight and 1 other of measure_helpers:half_used got no gradient, which "
            "DDP takes with find_unused_parameters=True alone: add --find-unused-parameters, or "
            "let the loss need it"
        )
    for ended in run_ranks(options.model_copy(update={"find_unused_parameters": True})):
        assert ended.returncode == 0, ended.stderr
    rounds = load_rounds(options.output)
    assert (rounds.optimizer, rounds.find_unused_parameters) == ("adamw", True)
    ready = {p.name: p.ready_s for p in rounds.parameters}
    assert ready["idle.weight"] == (None, None)
    assert list(ready) == [
        "idle.weight",
        "idle.bias",
        "used.bias",
        "used.weight_g",
        "used.weight_v",
    ]
    assert rounds.buffers == ()
    held = validate([options.output])
    figures = held.figures or held.oversubscribed  # where there are fewer cores
    assert figures is not None
    assert figures.buckets_agree == figures.cases == len(VARIANTS)


def test_samples_are_summed_up_by_round_and_by_rank() -> None:
    samples = ((1.0, 2.0), (4.0, 3.0), (5.0, 6.0))
    assert slowest(samples) == (2.0, 4.0, 6.0)
    assert rank_medians(samples) == (4.0, 3.0)


def test_rounds_that_cannot_be_written_are_kept_elsewhere(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rounds.model_dump_json(by_alias=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = Path(rescued("rounds.json", text).removeprefix("It is whole in ").partition(":")[0])
    assert load_rounds(path) == rounds
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert rescued("rounds.json", text).startswith("Nor can it be kept elsewhere (No such file")
