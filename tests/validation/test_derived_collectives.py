"""Reduce-scatters and all-gathers derived from all-reduces, beside recorded and published ones."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from held_out import nccl_presets
from validation.recorded import SHARDED, STRATEGIES

from calibrate.fit.profile import fit_logs
from calibrate.validate.report import Case
from calibrate.validate.validate import validate
from ddpsim.cluster.build import build_network
from ddpsim.cluster.cost import AllReduceLogCost
from ddpsim.cluster.fitted.network import network_from_profile
from ddpsim.cluster.network import OF_GLOO, OF_NCCL_LOG, OF_NCCL_PROFILE, Derived
from ddpsim.cluster.transfers import SHARDED as HALVES
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.importers.all_reduce import AllReduceLog
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.prediction.collective_times import load_cluster
from ddpsim.provenance import Uncertainty
from ddpsim.units import NS_PER_S

FOLDERS = (STRATEGIES, SHARDED)
UNMEASURED: dict[str, list[Any]] = {"measured_reduce_scatters": [], "measured_all_gathers": []}
LARGE_BYTES = 2**18
needs_reference = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"), reason="DDPSIM_REFERENCE_DATA is not set"
)


def rms(errors: Iterable[float]) -> float:
    return math.sqrt(fmean(error**2 for error in errors))


def sigma_at(derived: Derived, operation: Operation, size_bytes: int) -> float:
    known = [each for least, each in dict(derived)[operation] if least <= size_bytes]
    return known[-1].sigma


@cache
def profiles(folder: Path) -> tuple[ClusterProfile, ClusterProfile]:
    """A campaign's profile, whole and without its reduce-scatters and all-gathers."""
    read = json.loads((folder / "cluster.json").read_text("utf-8"))
    whole, bare = (ClusterProfile.model_validate(read | keys) for keys in ({}, UNMEASURED))
    return whole, bare


def gloo_errors(folder: Path, operation: Operation) -> Iterator[tuple[int, float]]:
    """Sizes, and logarithms of derived over measured times."""
    whole, bare = profiles(folder)
    for one in whole.measured_others[operation]:
        rate = f"{one.line_rate_bytes_per_s} B/s"
        cluster = {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core"}
        keys = {"cluster": cluster | {"inter_node": {"bandwidth": rate, "latency": "50 us"}}}
        network = network_from_profile(load_cluster(keys | {"ddp": {"backend": "gloo"}}), bare)
        derived_s = duration_ns(network.cost.transfer(operation, one.size_bytes)) / NS_PER_S
        yield one.size_bytes, math.log(derived_s / one.time_s)


@pytest.mark.parametrize("operation", sorted(HALVES))
def test_gloos_uncertainty_is_what_two_testbeds_say(operation: Operation) -> None:
    for is_large in (False, True):
        each = [
            rms(
                e for size, e in gloo_errors(folder, operation) if (size >= LARGE_BYTES) == is_large
            )
            for folder in FOLDERS
        ]
        known = sigma_at(OF_GLOO, operation, LARGE_BYTES if is_large else 0)
        assert known == pytest.approx(rms(each), abs=0.006)


@pytest.mark.parametrize("operation", sorted(HALVES))
def test_gloos_derived_times_have_no_common_bias(operation: Operation) -> None:
    """Nor has either testbed one of more than 6 % from 256 KiB on."""
    for folder in FOLDERS:
        errors = [e for size, e in gloo_errors(folder, operation) if size >= LARGE_BYTES]
        assert abs(fmean(errors)) < 0.06


@cache
def derived_steps(folder: Path, to: Path) -> tuple[Case, ...]:
    """Steps of fully_shard by a profile that measured no reduce-scatter and no all-gather."""
    profile = to / f"{folder.name}.json"
    profile.write_text(profiles(folder)[1].model_dump_json(by_alias=True), "utf-8")
    files = []
    for path in sorted(folder.glob("rounds-*.json")):
        rounds = json.loads(path.read_text("utf-8"))
        rounds["variants"] = [
            each for each in rounds["variants"] if each["variant"]["strategy"] == "fully_shard"
        ]
        files.append(to / path.name)
        files[-1].write_text(json.dumps(rounds), "utf-8")
    return tuple(case for sweep in validate(files, profile).sweeps for case in sweep.cases)


def test_the_interval_holds_sharded_steps_without_measured_gathers(tmp_path: Path) -> None:
    cases = [case for folder in FOLDERS for case in derived_steps(folder, tmp_path)]
    assert len(cases) == 24
    assert 0.7 <= fmean(bool(case.covered) for case in cases) <= 0.95
    assert median(abs(case.error) for case in cases) < 0.03


def test_a_step_says_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(profiles(SHARDED)[1].model_dump_json(by_alias=True), "utf-8")
    workload = {"model": "resnet18", "batch_per_rank": 4, "step_time": "100 ms"}
    keys: dict[str, Any] = {"schema": "ddpsim/1", "workload": workload}
    keys["ddp"] = {"backend": "gloo", "strategy": "fully_shard"}
    keys["cluster"] = {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core", "profile": str(path)}
    result = predict(load_scenario(keys))
    (told,) = [each for each in result.warnings if "derived" in each]
    assert told.startswith("reduce-scatters and all-gathers were not measured")
    assert told.endswith("measure with a longer --time-budget-s")
    interval = result.prediction_interval_s
    assert interval is not None
    network = next(source for source in interval.sources if source.input == "network model")
    assert "of 2 testbeds" in network.basis


def nccl_sweeps() -> dict[str, list[tuple[nccl_presets.Sweep, AllReduceLog]]]:
    """By machine: sweeps of the halves, each with the all-reduces of the same ranks."""
    logs = {
        sweep.name: AllReduceLog(
            sweep.name,
            "nccl-tests",
            *(sweep.keys["nodes"], sweep.keys["gpus_per_node"]),
            tuple(sorted(sweep.times_s.items())),
        )
        for sweep in nccl_presets.sweeps()
        if sweep.operation == "all_reduce"
    }
    found = defaultdict(list)
    for sweep in nccl_presets.sweeps():
        if sweep.operation != "all_reduce" and sweep.name in logs:
            found[sweep.machine].append((sweep, logs[sweep.name]))
    return found


def nccl_errors(sweep: nccl_presets.Sweep, log: AllReduceLog, cost: Any) -> Iterator[float]:
    for size, measured_s in sweep.times_s.items():
        if log.samples[0][0] <= size <= log.samples[-1][0]:
            derived_s = duration_ns(cost.transfer(sweep.operation, size)) / NS_PER_S
            yield math.log(derived_s / measured_s)


def by_log(sweep: nccl_presets.Sweep, log: AllReduceLog) -> Any:
    cost = build_network(load_cluster({"cluster": sweep.keys})).plain_cost
    return AllReduceLogCost(log, parts=tuple((each, None) for each in sorted(HALVES)), chosen=cost)


def by_fit(sweep: nccl_presets.Sweep, log: AllReduceLog) -> Any:
    keys = {key: sweep.keys[key] for key in ("nodes", "gpus_per_node")} | {
        "device": "a100-sxm-80gb"
    }
    return network_from_profile(load_cluster({"cluster": keys}), fitted(log)).plain_cost


@cache
def fitted(log: AllReduceLog) -> ClusterProfile:
    return fit_logs([log], log.source)


@needs_reference
@pytest.mark.slow
@pytest.mark.parametrize(("cost", "derived"), [(by_log, OF_NCCL_LOG), (by_fit, OF_NCCL_PROFILE)])
def test_nccls_uncertainty_is_what_four_clusters_say(cost: Any, derived: Derived) -> None:
    """And one that the other three say holds 75 to 90 % of each machine's times, all together."""
    errors = {
        machine: [e for sweep, log in each for e in nccl_errors(sweep, log, cost(sweep, log))]
        for machine, each in nccl_sweeps().items()
    }
    assert len(errors) == 4
    each = {machine: rms(own) for machine, own in errors.items()}
    assert sigma_at(derived, "all_gather", 0) == pytest.approx(rms(each.values()), abs=0.006)
    held = []
    for machine, own in errors.items():
        others = rms(sigma for other, sigma in each.items() if other != machine)
        factor = Uncertainty(others, "").factor
        held.append(fmean(abs(e) <= math.log(factor) for e in own))
    assert 0.7 <= fmean(held) <= 0.95
