"""Inputs that stand elsewhere: the project's scenarios, published ready times, the glossary."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcome import Outcome
from ruamel.yaml import YAML

from ddpsim import load_scenario
from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.glossary import _ALIASES, TERMS, lookup
from ddpsim.importers.profiles.model import read_profile
from ddpsim.scenario.catalog import resolve
from ddpsim.scenario.device import Device
from ddpsim.scenario.options.deepspeed import NO_EFFECT, DeepSpeed
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario

SCENARIOS = sorted((Path(__file__).resolve().parent.parent.parent / "scenarios").glob("*.yaml"))
REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")


def test_a_stock_section_of_deepspeed_is_taken_as_it_is() -> None:
    """That of Hugging Face's documentation: what changes no step is dropped."""
    stock = {"stage": 2, "offload_optimizer": {"device": "none"}, "allgather_partitions": True}
    stock |= {"allgather_bucket_size": 5e8, "overlap_comm": True, "reduce_scatter": True}
    stock |= {"reduce_bucket_size": 5e8, "contiguous_gradients": True, "sub_group_size": 1e9}
    stock |= {"stage3_prefetch_bucket_size": "auto", "round_robin_gradients": True}
    few = {"stage": 2, "overlap_comm": True, "round_robin_gradients": True}
    found = [DeepSpeed.model_validate(section) for section in (stock, few)]
    assert found[0] == found[1]
    assert NO_EFFECT.keys().isdisjoint(DeepSpeed.model_fields)


def test_there_are_scenarios() -> None:
    assert SCENARIOS


def test_the_printed_schema_accepts_every_scenario() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = Scenario.model_json_schema(by_alias=True)
    accepts = jsonschema.validators.validator_for(schema)
    accepts.check_schema(schema)
    for path in SCENARIOS:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        faults = [error.message for error in accepts(schema).iter_errors(document)]
        assert faults == [], path.name


def test_the_printed_schema_knows_the_short_forms() -> None:
    models = Scenario.model_json_schema(by_alias=True)["$defs"]
    for model, key in (("Cluster", "device"), ("Workload", "step_time")):
        forms = models[model]["properties"][key]["anyOf"]
        assert {"type": "string"} in forms
        assert any("$ref" in form for form in forms)


def test_the_printed_schema_knows_empty_sections() -> None:
    schema = Scenario.model_json_schema(by_alias=True)
    for key in ("ddp", "run"):
        assert {"type": "null"} in schema["properties"][key]["anyOf"]


def test_the_printed_schema_knows_the_newer_names() -> None:
    options = Scenario.model_json_schema(by_alias=True)["$defs"]["Ddp"]["properties"]
    assert options["forward_sync_buffers"] == options["broadcast_buffers"]


def test_an_unknown_command(cli: Callable[..., Outcome]) -> None:
    outcome = cli("rnu")
    assert (outcome.code, outcome.out) == (2, "")
    assert "No such command 'rnu'" in outcome.err
    assert "run" in outcome.err


def test_explain_knows_other_names(cli: Callable[..., Outcome]) -> None:
    assert {alias: lookup(alias) for alias in _ALIASES} == {
        alias: TERMS[term] for alias, term in _ALIASES.items()
    }
    alias, term = next(iter(_ALIASES.items()))
    assert cli("explain", alias).out == TERMS[term] + "\n"


def test_explain_takes_any_spelling() -> None:
    for term, said in TERMS.items():
        for spelling in (term.upper(), f" {term} ", term.replace(" ", "_"), term.replace("-", "_")):
            assert lookup(spelling) == said


def test_explain_takes_a_message_of_torch() -> None:
    said = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting"
    )
    assert lookup(said) == TERMS["unused parameters"]


def test_a_profile_of_absurd_depth_or_digits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ('{"a":' * 100_000, '{"schema": ' + "9" * 5000 + "}", '{"schema": 1e999}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ImportFailedError) as caught:
            read_profile(SourceFile("profile.json", path))
        assert len(str(caught.value)) < 200


@pytest.mark.skipif(
    REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of ready times"
)
def test_published_ready_times() -> None:
    paths = sorted((Path(str(REFERENCE)) / "ready-times").glob("*_ready_times.csv"))
    assert paths, "no ready times there"
    for path in paths:
        source = SourceFile(path.name, path)
        if path.name.startswith("ncf"):  # its rows are not in backward order: unusable as it is
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        found = [(p.name, p.numel, p.ready_s) for p in read_profile(source).parameters]
        assert found == [
            (row["param_name"], int(row["numel"]), pytest.approx(float(row["ready_us"]) * 1e-6))
            for row in rows
        ], path.name


def test_json_is_the_only_thing_on_stdout(cli: Callable[..., Outcome]) -> None:
    outcome = cli("run", str(SCENARIOS[0]), "--json")
    assert json.loads(outcome.out)["schema"] == "ddpsim.result/1"
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 6000", "rtx-6000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080ti"),
        ("Tesla T4", "t4"),
        ("Tesla P100-SXM2-16GB", "p100-sxm-16gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 3080", "rtx-3080"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx-1080ti"),
        ("1080 Ti", "gtx-1080ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("NVIDIA RTX A5000", "rtx-a5000"),
        ("A4000", "rtx-a4000"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("Quadro RTX 8000", "rtx-8000"),
    ],
)
def test_a_device_may_be_called_as_its_driver_calls_it(name: str, preset: str) -> None:
    assert resolve("device", name) == preset


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA H200 NVL", "NVIDIA A100-SXM-64GB", "NVIDIA L20", "NVIDIA", "NVIDIA H800 PCIe"),
        *("NVIDIA GeForce RTX 3080 Ti", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_a_device_is_not_taken_for_another_of_its_family(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device '{name}'"):
        resolve("device", name)


def test_a_presets_figures_may_be_changed() -> None:
    """What is not changed stays, with its source; what is, is the scenario's own."""

    def device(value: Any) -> Device:
        cluster = {"nodes": 1, "gpus_per_node": 8, "device": value}
        workload = {"model": "resnet50", "batch_per_rank": 8}
        scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
        return load_scenario(scenario).cluster.device

    usual = device("h100")
    changed = device({"preset": "NVIDIA H100 80GB HBM3", "operator": "12 us", "memory": "40 GB"})
    own = {"operator_s": 12e-6, "memory_bytes": 40e9}
    kept = {key: text for key, text in usual.sources.items() if key not in ("operator_s", "memory")}
    assert changed == usual.model_copy(update=own | {"sources": kept})
    assert usual.efficiency_trust("fp16") == changed.efficiency_trust("fp16") == "published"
    slower = device({"preset": "h100", "memory_bandwidth": "2 TB/s"})
    assert slower.efficiency_trust("fp16") == "assumed"
    assert usual.launching_trust(compiled=False) == "published"
    assert changed.launching_trust(compiled=False) == "stated"
    assert changed.launching_trust(compiled=True) == "assumed"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{preset: h10}", "cluster.device: unknown device 'h10'. Nearest: h100-sxm-80gb, "),
        ("{preset: 3}", "cluster.device: 3 is not a device"),
        ("{preset: h100, operatr: 12 us}", "operatr: unknown key. Did you mean 'operator'?"),
        ("{preset: h100, operator: 1 s}", "operator: 1.0 is out of range: wanted at most 0.01"),
        ("{preset: h100, launch: -1 us}", "cluster.device.launch: "),
    ],
)
def test_a_preset_is_not_changed_into_nonsense(value: str, says: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        load_scenario(SCENARIOS[0], [f"cluster.device={value}"])
    assert says in str(raised.value)
