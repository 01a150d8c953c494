"""Figures of the pages are those of the program, and of what was recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import docs_pages
import docs_results
import pytest
import timeline_svg
from campaigns import unpacked
from doc_pages import DOCS, ROOT

import ddpsim
from ddpsim.cluster import build, from_links, logs
from ddpsim.cluster.cost import SingleRankCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.topology import host
from ddpsim.cluster.topology.host import STATED_LINKS
from ddpsim.cluster.transfers import Operation
from ddpsim.diagnosis.hypotheses import HYPOTHESES, UNKNOWN, UNKNOWN_ODDS
from ddpsim.prediction import interval
from ddpsim.prediction.resolve import resolve
from ddpsim.provenance import Uncertainty
from ddpsim.strategies.ddp.costs import DdpCosts

EXPLANATION = DOCS / "explanation"
VALIDATION = (DOCS / "validation.md").read_text("utf-8")


def words(name: str) -> str:
    """A page of the explanation on one line."""
    return " ".join((EXPLANATION / f"{name}.md").read_text("utf-8").split())


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables of a page: the other cells, by the first one."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_every_format_is_described() -> None:
    """But for what a sweep and a testbed keep for themselves."""
    own = {"sweep-journal", "testbed"}
    sources = [file for room in ("ddpsim", "calibrate") for file in (ROOT / room).rglob("*.py")]
    texts = [file.read_text("utf-8") for file in sources]
    named = {name for text in texts for name in re.findall(r"\bddpsim\.([a-z-]+)/\d", text)}
    page = (DOCS / "reference" / "files.md").read_text("utf-8")
    assert "result" in named
    assert {name for name in named - own if f"`ddpsim.{name}/" not in page} == set()


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    assert set(re.findall(r"^::: ddpsim\.(\w+)$", page, re.MULTILINE)) == set(ddpsim.__all__)


def test_the_generated_reference_explains_all_that_it_lists() -> None:
    """Every key of a scenario and every option of a command has a meaning."""
    for page in (docs_pages.scenario_page(), docs_pages.commands_page()):
        listed = [line for line in page.splitlines() if line.startswith("| `")]
        assert len(listed) > 80
        assert [line for line in listed if line.endswith("|  |")] == []
        assert "object" not in page.replace("mapping", "")
    anchors = set(re.findall(r"^### (\w+)$", docs_results.results_page(), re.MULTILINE))
    linked = set(re.findall(r"\[(\w+)\]\(#", docs_results.results_page()))
    assert "Breakdown" in linked
    assert linked <= anchors


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ("--measured", "60 ms")),
        ("sweep", ("--set", "ddp.bucket_cap_mb=1,25")),
        ("compare", ("--each-flag",)),
        ("explain-step", ()),
        ("tune", ()),
        ("plan", ("--target", "1M samples", "--max-gpus", "16")),
        ("diagnose", ("--measured", "90 ms")),
    ],
)
def test_what_json_prints_is_listed(
    command: str, options: tuple[str, ...], cli: Callable[..., Any]
) -> None:
    """Every name of the JSON, at any depth, stands in the command's section or one before it."""
    done = cli(command, str(timeline_svg.SCENARIO), *options, "--json")
    page = docs_results.results_page()
    before, section, after = page.partition(f"## {command}: ")
    listed = before + section + after.partition("\n## ")[0]
    assert [key for key in keys_of(json.loads(done.out)) if f"`{key}`" not in listed] == []


def keys_of(answer: Any) -> set[str]:
    """The names in JSON, but for dotted keys of a scenario and the ends of percentiles."""
    if isinstance(answer, list):
        return set().union(*map(keys_of, answer))
    if not isinstance(answer, dict):
        return set()
    own = {re.sub(r"_p\d+$", "", key) for key in answer if "." not in key}
    return own.union(*map(keys_of, answer.values()))


def test_odds_of_causes_are_those_of_the_program() -> None:
    known = {each.key: f"{each.odds:g}" for each in HYPOTHESES} | {UNKNOWN: f"{UNKNOWN_ODDS:g}"}
    page = (EXPLANATION / "diagnosis.md").read_text("utf-8")
    listed = {name.strip("`"): cells[0] for name, cells in rows(page).items() if "`" in name}
    assert listed == known


def test_the_picture_is_the_step() -> None:
    assert timeline_svg.IMAGE.read_text("utf-8") == timeline_svg.timeline_svg()


def test_ddps_own_costs() -> None:
    text = words("index")
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet50", "batch_per_rank": 32, "step_time": "97 ms"},
        "cluster": {"device": "v100-sxm-32gb", "nodes": 1, "gpus_per_node": 8},
    }
    job = resolve(ddpsim.load_scenario(scenario))

    def costs(**options: Any) -> DdpCosts:
        ddp = job.scenario.ddp.model_copy(update=options)
        return DdpCosts(job.scenario.cluster.device, ddp)

    alone = scenario | {"cluster": scenario["cluster"] | {"gpus_per_node": 1}}
    added_s = ddpsim.simulate(ddpsim.load_scenario(alone)).iteration_time_s.mean - 97e-3
    assert f"has {len(job.model.parameters)} gradients" in text
    assert f"buffers add {1e3 * added_s:.1f} ms to its 97 ms" in text
    unused = costs(find_unused_parameters=True)
    assert f"{1e6 * costs().forward_hook_s:.2f} µs a parameter" in text
    assert f"({1e6 * unused.forward_hook_s:.1f} with `find_unused_parameters`)" in text
    launches = (costs(), costs(comm_hook="allreduce"))
    plain, hooked = (1e6 * each.launch_collective_s for each in launches)
    assert f"{plain:.0f} µs, {hooked:.0f} with any `comm_hook`" in text
    factors = re.search(r"by DDP on one GPU \| (\S+) to (\S+) times as long", VALIDATION)
    assert factors
    assert f"that factor is {factors[1]} to {factors[2]}" in text


@pytest.mark.parametrize(
    ("row", "sigma"),
    [
        ("compute: estimate, convolutional network", interval.ROOFLINE["convolutional"]),
        ("compute: estimate, model with attention", interval.ROOFLINE["attention"]),
        ("compute: estimate, device of one's own", interval.UNKNOWN_DEVICE),
        ("compute: estimate under `torch.compile`", interval.COMPILED),
        ("compute: stated, profiled or traced step", interval.COMPUTE["measured"]),
        ("compute: trace that waits for its host", interval.COMPUTE["slowed"]),
        ("host: estimated operators", interval.HOST),
        ("host: stated `operator`", interval.STATED_HOST),
        ("host: device file", interval.MEASURED_HOST),
        ("network: log of these ranks", logs.LOG),
        ("network: stated links", STATED_LINKS),
        ("network: preset links in a node", from_links.PRESET_LINKS),
        ("network: GPUs that meet in host memory", host.HOST_MEMORY),
        ("network: GPUs peer to peer through the host", host.PEER_TO_PEER),
        ("network: preset links between nodes", from_links.PRESET_NETWORK),
        ("network: TCP above 10 Gbit/s, or with limited flows", from_links.TCP_NETWORK),
        ("network: TCP above 10 Gbit/s of an unknown cloud", from_links.UNLIMITED_TCP),
        ("network: log of other ranks or sizes", logs.EXTRAPOLATED_LOG),
        ("interference of NCCL", build.PRIOR_INTERFERENCE),
        ("data loader's rate", interval.DATA),
    ],
)
def test_standard_deviations(row: str, sigma: Uncertainty) -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    assert table[row][0] == f"{100 * sigma.sigma:.0f} %"


_KIB_OF_COLUMNS = (64, 192, 1024, 3 * 1024, 32 * 1024, 128 * 1024, 512 * 1024)


@pytest.mark.parametrize(
    ("row", "known", "operation"),
    [
        ("in one node of a named machine", from_links.CHOSEN_IN_A_NODE, "all_gather"),
        ("all-reduce, InfiniBand or RoCE", from_links.CHOSEN_NETWORK, "all_reduce"),
        (
            "reduce-scatter or all-gather, InfiniBand or RoCE",
            from_links.CHOSEN_NETWORK,
            "all_gather",
        ),
        ("all-reduce, EFA", from_links.EFA_NETWORK, "all_reduce"),
        ("all-reduce, Slingshot", from_links.SLINGSHOT_NETWORK, "all_reduce"),
        (
            "reduce-scatter or all-gather, Slingshot",
            from_links.SLINGSHOT_NETWORK,
            "reduce_scatter",
        ),
    ],
)
def test_standard_deviations_by_size(
    row: str, known: from_links.LinkUncertainty, operation: Operation
) -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    network = Network(
        cost=SingleRankCost(),
        uncertainty=known.usual,
        limit="",
        provenance=(),
        by_size=known.by_size,
        of_shards=known.of_shards,
    )
    found = [network.uncertainty_of(kib * 1024, operation) for kib in _KIB_OF_COLUMNS]
    assert table[row] == [f"{100 * each.sigma:.3g} %" for each in found if each]


def test_what_can_only_lengthen_a_step() -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    hidden = interval.GLOO_SLOWDOWN
    assert table["gloo's interference, not calibrated"] == [
        f"{100 * hidden:.0f} % of the hidden communication",
        "all",
    ]
    assert table["parameters below 64 KiB that ZeRO-1 broadcasts over gloo"] == [
        f"{1e3 * each_s:.2g} ms each"
        for each_s in (interval.QUEUED_MOST_S, interval.QUEUED_USUAL_S)
    ]
    for row, told in (
        ("ranks, hosts and loaders that may differ", "images"),
        ("the same of language models", "other"),
    ):
        usual, most, _ = interval.UNEQUAL_RANKS[told]
        assert table[row] == [f"{100 * part:.2g} % of the step" for part in (most, usual)]


def test_what_compute_keeps_is_the_testbeds() -> None:
    profile = json.loads((unpacked() / "testbed" / "cluster.json").read_text("utf-8"))
    kept = [point["share"]["value"] for point in profile["interference"]["compute_kept"]]
    said = f"keeps {kept[1]:.2f} at 1 Gbit/s, {kept[2]:.2f} at 3 and {kept[4]:.2f} at 6"
    assert said in words("index")


def test_what_profiles_predict_is_validated() -> None:
    text = (EXPLANATION / "links.md").read_text("utf-8")
    for row, nodes in (
        ("1, 2 and 4 x 4 V100 | 16 x 4", "V100 over EDR, 1, 2 and 4 -> 16"),
        ("1, 2 and 4 x 4 V100 | 32 x 4", "V100 over EDR, 1, 2 and 4 -> 32"),
        ("1 and 2 x 8 A100 | 4 x 8", "A100 over HDR, 1 and 2 -> 4"),
        ("1 and 2 x 8 A100 | 16 x 8", "A100 over HDR, 1 and 2 -> 16"),
        *(
            (
                f"1 to 8 x 4 GH200, Slingshot | {n} x 4",
                f"GH200 over Slingshot, 1 to 8 -> {n}",
            )
            for n in (16, 64, 512)
        ),
    ):
        found = re.search(
            rf"\| {re.escape(nodes)} \| \d+ \| (\d+)% \| \S+ \| (\d+)% \|", VALIDATION
        )
        assert found
        assert f"| {row} | {found[1]} % | {found[2]} % |" in text


def test_speeds_are_those_of_the_record() -> None:
    """The table that benchmarks/report.py --page prints, and the figures below it."""
    results = ROOT / "benchmarks" / "results" / "0.1.0.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), str(results), "--page"]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said = (EXPLANATION / "performance.md").read_text("utf-8")
    table = [line for line in done.splitlines() if line.startswith("|")]
    assert len(table) == 28
    assert "\n".join(table) in said
    known = json.loads(results.read_text("utf-8"))["benchmarks"]
    medians_s = {name: known[f"test_{name}"]["median_s"] for name in (
        "folded_step", "simulate_folded", "thousand_bandwidths"
    )}  # fmt: skip
    step_s, whole_s, bandwidths_s = medians_s.values()
    words_said = " ".join(said.split())
    assert f"{1e3 * step_s:.0f} ms for the step of a job whose ranks are alike" in words_said
    assert f"{1e3 * whole_s:.0f} ms for its whole answer" in words_said
    assert f"{bandwidths_s:.0f} ms for each of 1,000 bandwidths" in words_said


# Accuracy: the levels of the validation page, in the words of the page and the README


def test_accuracy_of_the_benchmark() -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    found = r"25 MiB \(p50\) \| {} \| median (\S+)%, worst (\S+)% "
    levels = re.search(found.format("all"), VALIDATION)
    knowing = re.search(found.format("knowing DDP, 2 to 16 GPUs"), VALIDATION)
    assert levels
    assert knowing
    benchmark = next(cells for row, cells in table.items() if row.startswith("PyTorch's own"))
    assert benchmark == ["20", f"{levels[1]} %", f"{levels[2]} %", "-"]
    with_ddp = next(cells for row, cells in table.items() if row.startswith("the same, given also"))
    assert with_ddp == ["16", f"{knowing[1]} %", f"{knowing[2]} %", "-"]
    naive = re.findall(r"\*\* \|[^|]*\| \S+% \| (\S+)% \|", VALIDATION.split("Bucket 1 MiB:", 1)[0])
    assert len(naive) == 20
    worst = max(abs(float(error)) for error in naive)
    assert f"compute alone is off by up to {worst} %" in words("accuracy")


def test_accuracy_with_synthetic_images() -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    machines = re.findall(r"^\| (lambda-\S+) \|.*? ms \| (.*) \|$", VALIDATION, re.MULTILINE)
    errors = [
        abs(float(cell.strip(" %")))
        for _, cells in machines
        for cell in cells.split("|")
        if cell.strip()
    ]
    inside = re.search(r"\| synthetic images \|.* (\d+) of (\d+) \|", VALIDATION)
    assert inside
    assert int(inside[2]) == len(errors)
    name, cells = next(item for item in table.items() if item[0].startswith("published steps"))
    assert f"{len({machine for machine, _ in machines})} machines" in name
    share = int(inside[1]) / int(inside[2])
    assert cells == [
        str(len(errors)),
        f"{median(errors):.1f} %",
        f"{max(errors):.0f} %",
        f"{100 * share:.0f} %",
    ]


def test_accuracy_of_the_campaigns() -> None:
    table = rows((EXPLANATION / "accuracy.md").read_text("utf-8"))
    others = ("Intel", "faster", "slower EPYC, restless", "slower EPYC, calm")
    names = ("real gloo DDP", *(f"the same, {name}" for name in others))
    levels = rows(VALIDATION)
    cases = levels["cases"][1:6]
    columns = (levels[f"error, {which}"][1:6] for which in ("median", "worst"))
    held = levels["80 % interval holds"][1:6]
    for start, *own in zip(names, cases, *columns, held, strict=True):
        said = next(cells for row, cells in table.items() if row.startswith(start))
        assert said == [own[0], *(cell.replace("%", " %") for cell in own[1:])]


def test_errors_of_preset_networks() -> None:
    """Each machine left out, as section 4 of the validation page has them."""
    section = VALIDATION.split("### Presets, each machine left out", 1)[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if "all-reduce" in line]
    found = {cells[0]: cells[3:6] for cells in lines}
    told, text = rows((EXPLANATION / "nccl.md").read_text("utf-8")), words("accuracy")
    for group in ("InfiniBand and RoCE", "EFA", "Slingshot"):
        middle, _, held = (cell.replace("%", " %") for cell in found[group])
        assert told[group] == [middle, held]
        assert f"{middle} over {group}" in text


def test_errors_of_presets_in_one_node() -> None:
    section = VALIDATION.split("### Machines, and what NCCL", 1)[1].split("\n### ", 1)[0]
    found = rows(section)
    nodes = [cells for row, cells in found.items() if re.search(r"-1x\d", row)]
    middle = [abs(float(cells[3].partition("%")[0])) for cells in nodes]
    large = [abs(float(cells[4].partition("%")[0])) for cells in nodes if cells[4]]
    assert (len(middle), len(large)) == (5, 2)
    said = re.search(r"within (\d+) % at 256 MB .* within (\d+) % at 4 to 32 MiB", words("nccl"))
    assert said
    assert max(large) <= int(said[1])
    assert max(middle) <= int(said[2])


def test_known_errors() -> None:
    text = words("accuracy")
    compute = VALIDATION.split("## 3.", 1)[1].split("## 4.", 1)[0]
    device, host = (
        float(error) for error in re.findall(r"^\| \w+-bound \| \d+ \| (\S+)% \|", compute, re.M)
    )
    assert f"The median error is {device:.0f} % where the device sets the step" in text
    assert f"The median error is {host:.0f} % where the host sets the step" in text
    jobs = VALIDATION.split("### Published throughputs", 1)[1].split("\n##", 1)[0]
    longer = [
        100 * (float(measured) / float(predicted) - 1)
        for measured, predicted in re.findall(r"\| (\S+) ms \| (\S+) ms \|", jobs)
    ]
    assert len(longer) == 22
    assert f"take {min(longer):.0f} to {max(longer):.0f} % longer than predicted" in text
    sweep = re.search(r"Error: median (\S+)%, worst \S+%, all too short\.", VALIDATION)
    assert sweep
    assert f"comes out {sweep[1]} % low (median). It is not explained." in text


def test_the_pages_are_made_without_mkdocs() -> None:
    """The hook imports MkDocs only when MkDocs calls it."""
    assert "mkdocs" not in sys.modules
    assert Path(docs_pages.__file__).name == "docs_pages.py"
    assert set(docs_pages.PAGES).isdisjoint(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*"))


def test_the_error_where_cores_are_shared() -> None:
    worst = re.search(r"four ranks on two cores .*, (\S+) % at most", VALIDATION)
    assert worst
    assert f"errors go up to {worst[1]} %" in words("accuracy")
