"""The command `ddpsim plan`: its screen, its JSON and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from outcome import Outcome
from plan_scenarios import IMAGENET, plan_of_imagenet
from pydantic import TypeAdapter

from ddpsim.result.capacity import CapacityPlan

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = ROOT / "scenarios"
GOLDEN = Path(__file__).parents[2] / "golden"
Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def imagenet() -> CapacityPlan:
    return plan_of_imagenet()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "resnet50-2x8-25gbit",
            ("--target", f"{IMAGENET} in 1 h", "--price", "2.50 USD"),
        ),
        ("gpt2-bucket-choice", ("--target", "300B tokens in 4 days")),
    ],
)
def test_golden(
    name: str,
    arguments: tuple[str, ...],
    cli: Cli,
    golden: Callable[[str, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    done = cli("plan", f"scenarios/{name}.yaml", *arguments)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    golden(done.out, GOLDEN / f"plan-{name}.txt")


def test_json_has_its_schema(cli: Cli, imagenet: CapacityPlan) -> None:
    file = str(SCENARIOS / "resnet50-2x8-25gbit.yaml")
    options = ("--target", f"{IMAGENET} in 1 h", "--price", "2.50 USD", "--max-gpus", "128")
    done = cli("plan", file, *options, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert document == json.loads(json.dumps(imagenet.to_dict()))
    assert (document["schema"], document["knee_efficiency"]) == ("ddpsim.plan/1", 0.8)
    schema = TypeAdapter(CapacityPlan).json_schema()
    jsonschema.validate(document, schema)
    assert set(document) == {"schema", "knee_efficiency", *schema["properties"]}
    assert document["answer"] in document["sizes"]


def test_settings_and_the_next_command(cli: Cli) -> None:
    file = str(SCENARIOS / "resnet50-8xa100.yaml")
    chosen = ("--set", "ddp.bucket_cap_mb=50", "--set", "cluster.nodes=4")
    done = cli("plan", file, "--target", "10M samples in 1 h", *chosen, "--max-gpus", "64")
    assert done.code == 0
    last = " ".join(done.out.split("next ")[1].replace("\\", " ").split())
    assert "--set ddp.bucket_cap_mb=50 --set cluster.nodes=1" in last
    assert "cluster.nodes=4" not in last


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--target", "24 h"), "Invalid value for --target: '24 h' is not a target"),
        (("--target", "1M samples", "--price", "2"), "Invalid value for --price: '2' is not an am"),
        (("--target", "1M samples", "--budget", "2 USD"), "Invalid value for --budget: needs --pr"),
        (("--target", "1M samples", "--max-gpus", "0"), "Invalid value for --max-gpus: 0 is out"),
        (
            ("--target", "1M samples", "--max-gpus", "x"),
            "--max-gpus': wanted a whole number, got 'x'",
        ),
        ((), "Missing option '--target'"),
    ],
)
def test_wrong_options(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    done = cli("plan", str(SCENARIOS / "resnet50-8xa100.yaml"), *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err
