"""Bad input: every file in `invalid/` must end with exactly the message that stands beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outcome import Outcome

import ddpsim
from ddpsim.errors import DdpsimError, ScenarioError
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.keys import all_keys
from ddpsim.scenario.load import parse

FOLDER = Path(__file__).parent.parent / "invalid"

COMMANDS = {
    "scenario-missing": ["run", "nowhere.yaml"],
    "scenario-is-a-directory": ["run", "files"],
    "check-reports-the-same": ["check", "misspelt-key-link.yaml"],
} | {
    f"set-{name}": ["run", "files/good.yaml", "--set", setting]
    for name, setting in {
        "without-equals": "cluster.nodes",
        "without-key": "=4",
        "unknown-key": "ddp.bucket_cap=50",
        "unknown-section": "dpp.bucket_cap_mb=50",
        "comma-list": "ddp.bucket_cap_mb=1,25",
        "through-a-scalar": "cluster.nodes.count=4",
        "through-text": "workload.model.name=resnet50",
        "without-unit": "workload.step_time=5",
        "broken-list": "ddp.bucket_cap_mb=[1,25",
        "empty-list": "workload.lora.modules=[]",
        "empty-value": "cluster.nodes=",
        "whole-section": "ddp=5",
        "path-from-here": "workload.profile=other-node-missing.yaml",
        "rank-out-of-range": "cluster.stragglers.factors.16=1.5",
        "torch-older": "ddp.torch='2.4'",
        "link-as-word": "cluster.intra_node=pcie",
        "rate-as-time": "cluster.inter_node.bandwidth=25 us",
        "key-of-another-section": "workload.bucket_cap_mb=25",
        "name-of-another-program": "workload.gradient_accumulation_steps=2",
        "processes-of-all-nodes": "cluster.num_processes=16",
        "value-of-another-program": "workload.precision=bf16-mixed",
        "value-in-a-new-section": "workload.optimizer=lion",
        "trace-as-yaml": "workload.trace=good.yaml",
    }.items()
}
CASES = {path.stem: ["run", path.name] for path in sorted(FOLDER.glob("*.yaml"))} | COMMANDS


RAW = ("Value error", "Assertion failed", "Input should", "another value", "permitted")
WRONG = ("[]", "'?'", "-1", "1e400", "true", "{'?': 1}", "[1, '?']", "[{}]", "3.5", "1e30")


def refusal(base: Document, setting: str) -> str:
    """What is said against a setting, if it is refused."""
    try:
        parse(base.changed([setting]))
    except ScenarioError as error:
        return str(error)
    return ""


def test_no_key_is_refused_in_pydantics_words() -> None:
    """Each key of the schema with values of other types, signs and sizes."""
    paths = all_keys()
    assert {"cluster.inter_node.latency", "ddp.fully_shard.offload_policy.host_link"} <= {*paths}
    base = load(FOLDER / "files" / "good.yaml")
    said = [refusal(base, f"{path}={value}") for path, value in product(paths, WRONG)]
    assert sum(map(bool, said)) > 0.8 * len(said)
    assert [text for text in said if any(raw in text for raw in RAW)] == []


def test_each_value_is_answered_or_refused() -> None:
    """Values that the schema takes, of a model with shapes that options change."""
    path = FOLDER.parents[1] / "scenarios" / "llama-70b-fully-shard.yaml"
    base = load(path)
    keys = all_keys()
    settings = [f"{key}={value}" for key, value in product(keys, ("[]", "3.5", "true", "1e30"))]
    taken = [setting for setting in settings if not refusal(base, setting)]
    assert len(taken) > 20
    for setting in taken:
        with suppress(DdpsimError):
            ddpsim.load_scenario(path, [setting])


@pytest.mark.parametrize("name", CASES)
def test_message(
    name: str,
    cli: Callable[..., Outcome],
    golden: Callable[[str, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(FOLDER)
    outcome = cli(*CASES[name])
    golden(outcome.err, FOLDER / f"{name}.txt")
    assert (outcome.code, outcome.out) == (2, "")
    assert_short_and_placed(outcome.err)


def assert_short_and_placed(said: str) -> None:
    *problems, summary = said.splitlines()
    count = len(problems)
    assert summary == f"{count} error{'s' * (count > 1)}, nothing was simulated."
    for problem in problems:
        assert re.match(r"([\w./-]+(:\d+(:\d+)?)?|--set \S+( \S+)?)(  [^:]+)?: \S", problem)
        assert len(problem) < 450


@pytest.mark.parametrize(
    "name", ["several-sections", "binary", "log-16-ranks-for-24", "set-comma-list"]
)
def test_message_of_a_real_process(name: str) -> None:
    command = [sys.executable, "-m", "ddpsim", *CASES[name]]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.stderr == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "")


def test_every_expectation_has_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize(
    "text",
    [
        "workload: {model: resnet50, batch_per_rank: 0x" + "f" * 5000 + "}",
        "workload: {model: resnet50, batch_per_rank: " + "9" * 5000 + "}",
        "workload: {model: resnet50, batch_per_rank: 1e400}",
        "workload: {model: resnet50, step_time: '" + "9" * 100_000 + "'}",
        "workload: {model: " + "x" * 100_000 + "}",
        "workload: {profile: " + "x" * 100_000 + "}",
        "workload: {model: [" + "x, " * 10_000 + "x]}",
        "x" * 100_000 + ": 1",
        "workload: {" + "x" * 1000 + ": 1}",
        "workload: " + "[" * 40 + "]" * 40,
        "workload: " + "[" * 60 + "]" * 60,
        "workload: " + "[" * 300 + "]" * 300,
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
        "workload: &w {model: resnet50, data: *w}",
        "workload: &w [*w]",
        "when: 2020-99-99",
        "? {a: 1}\n: 2",
        "null: 1",
        '"\\ud800": "\\ud800"',
    ],
    ids=range(19),
)
def test_no_message_is_a_page(text: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text("schema: ddpsim/1\n" + text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        ddpsim.load_scenario(path)
    for problem in caught.value.problems:
        assert len(str(problem)) < 500 + len(str(path))


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "schema: ddpsim/1\n"
        "workload: {model: resnet50, batch_per_rank: &n 8}\n"
        "cluster:\n"
        "  nodes: *n\n"
        "  gpus_per_node: *n\n"
        "  device: a100\n"
        "  intra_node: &link {bandwidth: 100 GB/s, latency: 5 us}\n"
        "  inter_node: {<<: *link, latency: 20 us, nics_per_node: 2}\n",
        encoding="utf-8",
    )
    cluster = ddpsim.load_scenario(path).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (8, 8)
    assert cluster.inter_node is not None
    assert cluster.inter_node.bandwidth_bytes_per_s == 100e9
    assert cluster.inter_node.latency_s == pytest.approx(20e-6)


def test_byte_order_mark_and_unquoted_torch(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    text = (FOLDER / "files" / "good.yaml").read_text(encoding="utf-8")
    path.write_text(text + "ddp: {torch: 2.13}\n", encoding="utf-8-sig")
    assert ddpsim.load_scenario(path).ddp.torch == "2.13"


def _good(*settings: str) -> ddpsim.Scenario:
    return ddpsim.load_scenario(FOLDER / "files" / "good.yaml", settings)


@pytest.mark.parametrize("section", ["ddp", "run", "workload.optimizer"])
def test_a_section_with_nothing_under_it_is_its_defaults(section: str) -> None:
    assert _good(f"{section}=null") == _good()


def test_settings_reach_under_an_empty_section() -> None:
    assert _good("ddp=null", "ddp.bucket_cap_mb=50").ddp.bucket_cap_mb == 50


def test_settings_take_ranks_and_quoted_text() -> None:
    stragglers = _good("cluster.stragglers.factors.3=1.5").cluster.stragglers
    assert stragglers is not None
    assert stragglers.factors == {3: 1.5}
    assert _good('name="A, B"').name == _good("name='A, B'").name == "A, B"


def test_json_writes_ranks_and_nodes_as_text(tmp_path: Path) -> None:
    """With the same meaning as in YAML, and within reach of `--set`."""
    cluster = {
        "nodes": 4,
        "gpus_per_node": 1,
        "device": "a100-sxm-40gb",
        "weak_links": {1: 0.5},
        "other_nodes": {2: {"inter_node": {"bandwidth": "3 GB/s"}}},
        "stragglers": {"factors": {0: 1.2, 3: 1.1}},
    }
    workload = {"model": "resnet18", "batch_per_rank": 1}
    plain = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(plain))
    changes = (
        [],
        ["cluster.weak_links.1=0.7", "cluster.stragglers.factors.2=1.3"],
        ["cluster.other_nodes.2.inter_node.nics_per_node=2"],
    )
    for changed in changes:
        assert ddpsim.load_scenario(path, changed) == ddpsim.load_scenario(plain, changed)
    with pytest.raises(ScenarioError, match=r"weak_links.x: wanted a whole number, got 'x'"):
        ddpsim.load_scenario(path, ["cluster.weak_links.x=0.5"])


def test_overrides_leave_the_mapping_alone() -> None:
    given = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet18", "batch_per_rank": 8},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "a100"},
    }
    before = deepcopy(given)
    assert ddpsim.load_scenario(given, ["cluster.nodes=2"]).cluster.nodes == 2
    assert given == before


VALID: dict[str, Any] = {
    "schema": "ddpsim/1",
    "name": "valid",
    "workload": {
        "model": "resnet18",
        "batch_per_rank": 8,
        "image_size": 224,
        "precision": "amp-fp16",
        "step_time": {"forward": "10 ms", "backward": "20 ms", "optimizer": "1 ms"},
        "optimizer": {"name": "adam", "fused": True, "weight_decay": 0.1},
        "data": {"rate": "2500 samples/s", "workers": 2, "prefetch": 2},
    },
    "ddp": {"backend": "nccl", "torch": "2.13", "bucket_cap_mb": [1, 25], "static_graph": True},
    "cluster": {
        "nodes": 2,
        "gpus_per_node": 2,
        "device": {
            "peak_flops": {"fp32": "10 TFLOP/s", "fp16": "80 TFLOP/s"},
            "matmul_efficiency": {"fp32": 0.5},
            "memory": "24 GB",
            "memory_bandwidth": "900 GB/s",
            "kernel_floor": "3 us",
        },
        "intra_node": {"bandwidth": "20 GB/s", "latency": "8 us"},
        "inter_node": {"bandwidth": "25 Gbit/s", "latency": "20 us", "oversubscription": 2},
        "stragglers": {"factors": {3: 1.2}},
    },
    "run": {"iterations": 2, "seed": 1, "jitter": {"sigma": 0.01}, "allow_extrapolation": False},
}


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else ()
    return [path, *(found for key, value in children for found in _paths(value, (*path, key)))]


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**30, -(10**400), 2**63]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["0 s", "1e300 s", "1e-300 GB/s", "5 us", "resnet50", "cpu", "auto", "default"]
    ),
    st.dates(),
    st.binary(max_size=3),
)
_VALUES = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=4), _SCALARS, max_size=3),
)
_KEYS = st.one_of(st.text(max_size=5), st.integers(-2, 9), st.none())


@given(
    st.lists(st.tuples(st.sampled_from(_paths(VALID)[1:]), _VALUES), min_size=1, max_size=3),
    st.lists(st.sampled_from(_paths(VALID)[1:]), max_size=1),
    st.dictionaries(_KEYS, _VALUES, max_size=1),
)
@settings(max_examples=200)
def test_a_mutated_scenario_loads_or_is_refused(
    replaced: list[tuple[tuple[Any, ...], Any]],
    removed: list[tuple[Any, ...]],
    added: dict[Any, Any],
) -> None:
    data = deepcopy(VALID)
    for (*path, key), value in [*replaced, *((path, ...) for path in removed)]:
        target: Any = data
        for step in path:
            target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            continue
        if value is ...:
            target.pop(key, None)
        else:
            target[key] = value
            target.update(added)
    with suppress(ddpsim.DdpsimError):
        ddpsim.load_scenario(data)


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
@settings(max_examples=150)
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("schema: ddpsim/1\n" + text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ScenarioError):
        ddpsim.load_scenario(path)
