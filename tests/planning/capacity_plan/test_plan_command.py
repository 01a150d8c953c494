"""The command `ddpsim plan`: its screen, its JSON and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from merge_prices import written
from outcome import Outcome
from plan_scenarios import IMAGENET, plan_of_imagenet
from pydantic import TypeAdapter

from ddpsim.errors import ImportFailedError
from ddpsim.importers.prices import merged, read_prices
from ddpsim.report.page.charts import plan_charts
from ddpsim.report.page.shell import answer_page
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
        (
            "resnet50-2x8-25gbit --set name=failures",
            (
                *("--target", "9k epochs of 1.28M samples in 30 days with 90 % certainty"),
                *("--mtbf", "900 h", "--spares", "auto", "--max-gpus", "16"),
                *("--set", "workload.checkpoint_write={every: auto, bandwidth: 1 GB/s}"),
                *("--set", "workload.step_time=40 ms"),
                *("--price", "2.50 USD", "--pue", "1.2", "--carbon", "380"),
            ),
        ),
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
    file, *settings = name.split()
    done = cli("plan", f"scenarios/{file}.yaml", *settings, *arguments)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    golden(done.out, GOLDEN / f"plan-{name.rsplit('=', maxsplit=1)[-1]}.txt")


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
        (("--target", "1M samples in 1 h with 90 % certainty"), "--target: a certainty needs what"),
        (("--target", "1M samples in 1 h with 0.5 % certainty"), "'0.5' % certainty is out of ran"),
        (("--target", "1M samples", "--carbon", "300"), "Invalid value for --carbon: needs --pue"),
        (
            ("--target", "1M samples", "--pue", "0.5"),
            "Invalid value for --pue: 0.5 is out of range",
        ),
        (
            ("--target", "1M samples", "--price", "spot"),
            "no spot price of a cluster without a mach",
        ),
        (
            ("--target", "1M samples", "--prices", "p.csv"),
            "for --prices: needs --price on-demand, s",
        ),
        (("--target", "1M samples", "--mtbf", "5"), "reliability.mtbf: 5 has no unit"),
    ],
)
def test_wrong_options(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    done = cli("plan", str(SCENARIOS / "resnet50-8xa100.yaml"), *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_prices_are_merged_with_newer_rows(cli: Cli, tmp_path: Path) -> None:
    header = "machine,provider,region,gpus,on_demand,spot,one_year,currency,date,source\n"
    newer = tmp_path / "newer.csv"
    row = "p5.48xlarge,AWS,us-east-1,8,{},,30,USD,{},a price list\n"
    newer.write_text(header + row.format(50, "2027-01-01") + row.format(9, "2020-01-01"), "utf-8")
    known = merged(read_prices(), read_prices(newer))
    assert len(known) == len(read_prices()) > 10
    assert (tmp_path / "merged.csv").write_text(written(known), "utf-8")
    assert read_prices(tmp_path / "merged.csv") == known
    file = str(SCENARIOS / "training-loop.yaml")
    options = ("--set", "cluster.machine=p5", "--prices", str(newer), "--price", "one-year")
    done = cli("plan", file, "--target", "1M samples", "--max-gpus", "8", *options, "--json")
    assert json.loads(done.out)["price"] == {"amount": 30 / 8, "currency": "USD"}
    assert done.err == (
        "one-year price of p5.48xlarge at AWS, us-east-1, on 2027-01-01: a price list\n"
    )
    for bad, says in (
        (row.format("x", "2027-01-01"), "newer.csv:2: on_demand is 'x'; wanted a number above"),
        (row.format(1, "May"), "newer.csv:2: Invalid isoformat string: 'May'"),
        (row.format(1, "2027-01-01").replace("a price list", " "), "newer.csv:2: has no source"),
        (row.format(1, "2027-01-01").replace("p5.", "p9."), "newer.csv:2: unknown machine 'p9.48x"),
    ):
        newer.write_text(header + bad, "utf-8")
        with pytest.raises(ImportFailedError) as told:
            read_prices(newer)
        assert says in str(told.value)


def test_the_page_has_charts_and_the_text(imagenet: CapacityPlan, cli: Cli, tmp_path: Path) -> None:
    page = answer_page(imagenet.name, plan_charts(imagenet), "as text <b>")
    assert 'id="drawing-time"' in page
    assert "as text &lt;b&gt;" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    low, high, times, answer = data["figures"]["time"]["data"]
    assert times["x"] == [size.gpus for size in imagenet.sizes]
    assert times["y"] == [size.time_s / 86400 for size in imagenet.sizes]
    assert all(a < b < c for a, b, c in zip(low["y"], times["y"], high["y"], strict=True))
    assert answer["x"] == [imagenet.answer.gpus]
    file = str(SCENARIOS / "resnet50-8xa100.yaml")
    done = cli("plan", file, "--target", "1M samples", "-o", str(tmp_path / "no" / "p.html"))
    assert "Invalid value for -o: there is no folder" in done.err
