"""What a profile says should be measured next, on made measurements whose doubt is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from clusters.profiles import profile
from measured.made_measurements import NODE, NODES, SIZES, TWO_HDR, made_samples, nccl_model
from outcome import Outcome

import ddpsim
from calibrate.fit.next_measurement import Step, Target, next_measurements, show_next
from calibrate.fit.profile import fit_all_reduce
from calibrate.fit.samples import Sample, measured
from ddpsim.cluster.fitted.network import PER_DOUBLING, UNLIKE, network_from_profile
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.importers.profiles.nccl import NcclModel

LARGEST = 2**30
FOUR_HDR = TWO_HDR.model_copy(update={"nics_per_node": 4})
ONE_AND_TWO = tuple(
    made_samples(NODE, [(1, 8)], noise=0.05) + made_samples(NODES, [(2, 8)], noise=0.05)
)


def profile_of(model: NcclModel, samples: tuple[Sample, ...]) -> ClusterProfile:
    layouts = sorted({(sample.nodes, sample.gpus_per_node) for sample in samples})
    return ClusterProfile.model_validate(
        profile(
            backend="nccl",
            all_reduce=model.model_dump(),
            measured=[each.model_dump() for each in measured(samples)],
            valid={"size_bytes": [1024, LARGEST], "layouts": layouts, "line_rates_bytes_per_s": []},
        )
    )


@lru_cache(maxsize=8)
def fitted(samples: tuple[Sample, ...]) -> ClusterProfile:
    model = fit_all_reduce(samples, "nccl", gpu="NVIDIA A100-SXM4-80GB").model
    assert isinstance(model, NcclModel)
    return profile_of(model, samples)


def advised(known: ClusterProfile, target: Target) -> tuple[float, list[Step]]:
    assert isinstance(known.all_reduce, NcclModel)
    return next_measurements(known, known.all_reduce, target)


def figures_variance(sigma: float, doublings: float) -> float:
    """What the draws add to a sigma of ranks that were not measured."""
    return sigma**2 - UNLIKE**2 - PER_DOUBLING**2 * doublings


def test_the_spread_now_is_that_of_a_prediction() -> None:
    """A scenario's prediction takes 20 or more draws of the posterior, and errs by 16 %."""
    known = fitted(ONE_AND_TWO)
    scenario = ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet18", "batch_per_rank": 8},
            "cluster": {"device": "a100-sxm-80gb", "nodes": 16, "gpus_per_node": 8},
        }
    )
    network = network_from_profile(scenario, known)
    found = [network.uncertainty_of(2**power) for power in range(20, 29, 2)]
    taken = math.sqrt(np.mean([each.sigma**2 for each in found if each]))
    now, _ = advised(known, Target(16, 8, 8))
    assert now == pytest.approx(taken, rel=0.1)


def test_a_larger_layout_narrows_as_much_as_was_expected() -> None:
    """Fit, expect, measure what the fit's own posterior holds to be true, and fit again."""
    known = fitted(ONE_AND_TWO)
    now, steps = advised(known, Target(16, 8, 4))
    (step,) = (step for step in steps if step.nodes == 4)
    expected = figures_variance(step.sigma, 2)
    assert step.what == "all_reduce_perf -b 256K -e 16M -f 2"
    found = []
    for seed in range(2):
        best = known.all_reduce.hypotheses[0]  # type: ignore[union-attr]
        drawn = best.model_copy(update={"weight": 1.0, "draws": best.draws[seed : seed + 1]})
        truth = known.all_reduce.model_copy(update={"hypotheses": (drawn,)})
        sizes = [2**power for power in range(18, 25)]
        new = made_samples(truth, [(4, 8)], sizes, noise=0.2, seed=seed)
        after, _ = advised(fitted((*ONE_AND_TWO, *new)), Target(16, 8, 1))
        found.append(figures_variance(after, 2))
    assert math.sqrt(np.mean(found)) == pytest.approx(math.sqrt(expected), rel=0.25)
    assert expected < figures_variance(now, 3)


def in_doubt(*hypotheses: NcclModel) -> ClusterProfile:
    """Each may be true, with known figures; of two nodes only small messages were measured."""
    share = {"weight": 1 / len(hypotheses)}
    either = tuple(each.hypotheses[0].model_copy(update=share) for each in hypotheses)
    model = hypotheses[0].model_copy(update={"hypotheses": either})
    samples = made_samples(NODES, [(1, 8)]) + made_samples(NODES, [(2, 8)], SIZES[:7])
    return profile_of(model, tuple(samples))


def test_doubt_of_the_nics_asks_for_large_messages_between_nodes() -> None:
    """With two NICs or four a message takes as long, or half of it, if it is large."""
    known = in_doubt(nccl_model(TWO_HDR), nccl_model(FOUR_HDR))
    now, (best, *_, log) = advised(known, Target(4, 8, 2))
    assert (best.nodes, best.what) == (2, "all_reduce_perf -b 4M -e 64M -f 2")
    assert log.what == "NCCL_DEBUG=INFO: the NICs"
    apart = figures_variance(now, 1) - figures_variance(log.sigma, 1)
    assert 0 < apart < (math.log(2) / 2) ** 2


def test_doubt_of_ll128_asks_for_the_log_or_sizes_that_take_it() -> None:
    """On two nodes all-reduces of 128 KiB to 16 MiB take LL128, or else another protocol."""
    known = in_doubt(nccl_model(TWO_HDR), nccl_model(TWO_HDR, ll128=False))
    now, (best, *_, log) = advised(known, Target(4, 8, 2))
    assert (best.nodes, best.what) == (2, "all_reduce_perf -b 256K -e 16M -f 2")
    assert log.what == "NCCL_DEBUG=INFO: GPUDirect (LL128)"
    assert log.sigma < now


def test_a_target_that_is_measured_is_as_sure_as_what_was() -> None:
    _, steps = advised(fitted(ONE_AND_TWO), Target(6, 8, 6))
    assert (steps[0].nodes, steps[0].sigma) == (6, 0.03)


@pytest.mark.parametrize(
    ("layouts", "asked", "line"),
    [
        ([(1, 8)], None, "one node tells nothing of the network"),
        ([(1, 8), (2, 8)], 2, "16 ranks (2 x 8) were measured (80 % range -4 to +4 %)"),
    ],
)
def test_where_nothing_can_be_said(
    layouts: list[tuple[int, int]], asked: int | None, line: str
) -> None:
    known = profile_of(NODES, tuple(s for s in ONE_AND_TWO if (s.nodes, 8) in layouts))
    (said,) = show_next(known, Target.of(known, asked, None))
    assert line in said


def test_no_run_on_nodes_that_are_few_helps() -> None:
    """One node of one GPU has nothing to send."""
    known = profile_of(NODES, tuple(made_samples(NODES, [(2, 1)], SIZES[::4])))
    *_, last = show_next(known, Target.of(known, None, 1))
    assert last == "    nothing on up to 1 node narrows it: raise --up-to"


@pytest.mark.parametrize("option", ["--for", "--up-to"])
def test_gloos_profile_takes_no_nodes(
    option: str, tmp_path: Path, cli: Callable[..., Outcome]
) -> None:
    path = tmp_path / "gloo.json"
    path.write_text(json.dumps(profile()), encoding="utf-8")
    found = cli("calibrate", "show", str(path), option, "4")
    assert found.code == 2
    assert "a profile of gloo does not say what to measure next; drop it" in found.err
