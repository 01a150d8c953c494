"""A plan whose samples by global batch were measured."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
from shipped_scenarios import load as scenario

from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.capacity_plan.question import read_steps_by_batch
from ddpsim.report.capacity.plan import render_plan

TABLE = "batch,steps\n256,4000\n1024,1100\n4096,500\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text(TABLE)
    return path


def test_samples_are_read_between_measured_batches(table: Path) -> None:
    """At measured ones as measured; halfway in the logarithm the geometric mean."""
    known = read_steps_by_batch(table)
    least = 256 * 4000
    assert [known.growth(batch) for batch in (256, 1024, 4096)] == [
        1.0,
        1024 * 1100 / least,
        4096 * 500 / least,
    ]
    between = (1024 * 1100 * 4096 * 500) ** 0.5 / least
    assert known.growth(2048) == pytest.approx(between)


def test_a_plan_counts_them_and_leaves_out_what_was_not_measured(table: Path) -> None:
    asked = scenario("resnet50-2x8-25gbit")
    plan = plan_capacity(asked, "1.28M samples", max_gpus=128, steps_by_batch=table)
    assert [size.global_batch for size in plan.sizes] == [512, 1024, 2048, 4096]
    for size in plan.sizes:
        factor = read_steps_by_batch(table).growth(size.global_batch)
        assert size.samples_factor == factor
        assert size.steps == ceil(ceil(1_280_000 / size.global_batch) * factor)
    said = " ".join(render_plan(plan, "f.yaml").split())
    assert "measured for 3 global batches of 256 to 4,096, and read between them" in said
    assert "a global batch of 8,192 lies outside of 256 to 4,096" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("batch\n256\n", "steps.csv:1: lacks the column steps; wanted batch,steps"),
        ("batch,steps\n256,0\n512,1\n", "steps.csv:2: steps is '0'; wanted a number above"),
        ("batch,steps\n256,9\n256,8\n", "steps.csv:3: has the batch 256 twice; keep one"),
        ("batch,steps\n256,9\n", "steps.csv: has one batch; two at least"),
        ("batch,steps\n256,8\n512,9\n", "8 steps at batch 256 and 9 at 512; wanted no more"),
        (
            "batch,steps\n256,90\n512,30\n",
            "30 at 512, which are fewer samples; wanted",
        ),
    ],
)
def test_a_faulty_table_is_refused(table: Path, content: str, message: str) -> None:
    table.write_text(content)
    with pytest.raises(InputError, match=message):
        read_steps_by_batch(table)


def test_one_law_of_samples_is_enough(table: Path) -> None:
    both = {"critical_batch": 1024, "steps_by_batch": table}
    with pytest.raises(InputError, match="says what critical_batch says"):
        plan_capacity(scenario("resnet50-8xa100"), "1M samples", **both)
    with pytest.raises(InputError, match="no such file"):
        plan_capacity(scenario("resnet50-8xa100"), "1M samples", steps_by_batch="nowhere.csv")
