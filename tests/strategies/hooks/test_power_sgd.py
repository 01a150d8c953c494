"""PowerSGD: what it sends, that it hides nothing, what it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ddpsim
from ddpsim.errors import InputError
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario


def scenario_of(hook: str = "powerSGD", rate: str = "3 Gbit/s", **ddp: Any) -> Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 64, "precision": "amp-bf16"},
            "ddp": {"comm_hook": hook, **ddp},
            "cluster": {
                "nodes": 4,
                "gpus_per_node": 1,
                "device": "a100-sxm-80gb",
                "inter_node": {"bandwidth": rate, "latency": "50 us"},
            },
        }
    )


@pytest.mark.parametrize(("rank", "wrapper"), [(1, None), (2, None), (4, "fp16_compress")])
def test_it_sends_narrow_matrices(rank: int, wrapper: str | None) -> None:
    """Of each weight n r and m r elements where that is less than half of n m; others whole."""
    asked = {"matrix_approximation_rank": rank, "wrapper": wrapper}
    scenario, item_bytes = scenario_of(power_sgd=asked), 2 if wrapper else 4
    wanted = 0
    for parameter in resolve(scenario).model.parameters:
        n = parameter.rows or 0
        m = parameter.numel // n
        narrow = (n + m) * min(n, m, rank)
        wanted += item_bytes * (narrow if 2 * narrow < n * m else n * m)
    listed = ddpsim.simulate(scenario).collectives
    sent = [each.size_bytes for each in listed if each.operation == "all_reduce"]
    assert sum(sent) == wanted
    assert len(sent) == 3 * 5


def test_nothing_is_hidden_and_slow_links_win() -> None:
    plain, power = (ddpsim.simulate(scenario_of(hook)) for hook in ("none", "powerSGD"))
    hidden_s = power.comm_time_s - power.exposed_comm_s
    broadcasts_s = sum(
        each.end_s - each.start_s for each in power.collectives if each.operation == "broadcast"
    )
    assert hidden_s <= broadcasts_s
    assert power.iteration_time_s.mean < plain.iteration_time_s.mean / 4
    fast = [
        ddpsim.simulate(scenario_of(hook, "100 Gbit/s")).iteration_time_s.mean
        for hook in ("none", "powerSGD")
    ]
    assert fast[0] < fast[1]


def test_its_error_is_kept_beside_the_buckets() -> None:
    plain, power = (
        ddpsim.simulate(scenario_of(hook)).memory_bytes_per_gpu for hook in ("none", "powerSGD")
    )
    assert power.buckets > 2 * plain.buckets
    assert power.buckets < 2.1 * plain.buckets


def test_a_wrapper_halves_what_is_sent_and_kept_and_costs_two_casts() -> None:
    plain, half = (
        ddpsim.simulate(scenario_of(rate="100 Gbit/s", power_sgd={"wrapper": wrapper}))
        for wrapper in (None, "bf16_compress")
    )
    sent = [
        sum(each.size_bytes for each in result.collectives if each.operation == "all_reduce")
        for result in (plain, half)
    ]
    assert sent[0] == 2 * sent[1]
    buckets = resolve(scenario_of("none")).memory().buckets
    kept = [result.memory_bytes_per_gpu.buckets - buckets for result in (plain, half)]
    assert kept[0] == 2 * kept[1]


def test_plain_all_reduces_come_first() -> None:
    """Buckets are rebuilt in step 1, compressed from step 4 on."""
    scenario = scenario_of(power_sgd={"start_powerSGD_iter": 4})
    program = resolve(scenario).program
    assert [program.kind(number) for number in range(6)] == [0, 1, 1, 1, 2, 2]
    assert ddpsim.simulate(scenario).buckets_rebuilt_at == 1


def test_it_is_refused_where_no_shape_is_known() -> None:
    scenario = scenario_of()
    job = resolve(scenario)
    unshaped = tuple(parameter._replace(shape=None) for parameter in job.model.parameters)
    with pytest.raises(InputError, match="powerSGD needs the shape of"):
        compile_program(scenario, replace(job.model, parameters=unshaped))
