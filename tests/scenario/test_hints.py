"""What a message tells to write: written, the scenario loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ddpsim.errors import Problem, ScenarioError
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.options.ddp_values import _OTHER_NAMES, OWN_STRATEGIES
from ddpsim.scenario.schema import Scenario

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
INVALID = sorted((ROOT / "tests" / "invalid").glob("*.yaml"))
Data = dict[str, Any]

_KEY = r"([\w.]+)(?:, with ddp\.(\w+): (\w+))?"
_HERE = re.compile(r"Did you mean '([^']+)'\?(?: It is an option of (\w+): (\w+))?")
_THERE = re.compile(rf"(?:Did you mean |[Ww]rite it as |or ){_KEY}")
_UNDER = re.compile(
    r"(?:Write ddp\.(\w+): (\w+)\. )?The options of \w+ are written under (ddp\.\w+)"
)


def loaded(data: Data, base: Path) -> Scenario:
    return parse(Document.from_mapping(deepcopy(data), base))


def at(data: Data, path: Sequence[str]) -> Any:
    for step in path:
        data = data[int(step) if step.isdecimal() and int(step) in data else step]
    return data


def put(data: Data, path: Sequence[str], value: Any) -> None:
    for step in path[:-1]:
        data = data.setdefault(int(step) if step.isdecimal() else step, {})
    data[path[-1]] = value


def of_unknown_key(data: Data, path: Sequence[str], message: str) -> Iterator[Data]:
    """The scenario with each key that the message names in place of the unknown one."""
    under = [(m[3].split("."), m[1], m[2]) for m in _UNDER.finditer(message)]
    here = [([*path[:-1], m[1]], m[2], m[3]) for m in _HERE.finditer(message)]
    there = [(m[1].split("."), m[2], m[3]) for m in _THERE.finditer(message)]
    for new, option, chosen in under or here or there:
        whole = new if new[0] in Scenario.model_fields else [*path[:-1], *new]
        changed = deepcopy(data)
        value = at(changed, path[:-1]).pop(path[-1])
        with suppress(AttributeError, TypeError):  # a preset's name stands where the section is
            put(changed, whole, value)
        if option:
            put(changed, ("ddp", option), chosen)
        yield changed


def hints(data: Data, base: Path) -> list[Problem]:
    """What is wrong with it."""
    try:
        loaded(data, base)
    except ScenarioError as error:
        return list(error.problems)
    return []


def leaves(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items() if isinstance(data, dict) else ():
        if isinstance(key, str):
            yield (*path, key)
            yield from leaves(value, (*path, key))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_unknown_keys_of_real_scenarios(file: Path) -> None:
    """Each key misspelt, or in another section: one of the keys named makes it the same again."""
    data = YAML(typ="safe", pure=True).load(file)
    whole = loaded(data, file.parent)
    for path in [each for each in leaves(data) if len(each) > 1]:
        name, value = path[-1], at(data, path)
        for wrong in ((*path[:-1], name[:-1]), (*path[:-1], f"{name}s"), ("run", name)):
            changed = deepcopy(data)
            at(changed, path[:-1]).pop(name)
            put(changed, wrong, value)
            problems = {each.key: each.message for each in hints(changed, file.parent)}
            message = problems.get(".".join(wrong), "")
            if "Did you mean" in message or "Write" in message or "are written" in message:
                tried = of_unknown_key(changed, wrong, message)
                found = [
                    loaded(each, file.parent) for each in tried if not hints(each, file.parent)
                ]
                assert whole in found, (wrong, message)


NEWCOMERS = {  # what users of other programs write under ddp; the hint leads to the scenario
    "{strategy: hsdp, hsdp: {reshard_after_forward: false}}": "hsdp",
    "{strategy: fully_shard, fsdp2: {units: blocks}}": "fully_shard",
    "{strategy: deepspeed, zero: {stage: 2}}": "deepspeed",
    "{strategy: deepspeed, zero_optimization: {stage: 2}}": "deepspeed",
    "{zero: {stage: 2}}": "deepspeed",
    "{fsdp: {reshard_after_forward: false}}": "fully_shard",
    "{hsdp: {reshard_after_forward: false}}": "hsdp",
    "{reshard_after_forward: false}": "fully_shard",
    "{sharding_strategy: SHARD_GRAD_OP}": "fsdp1",
    "{zero_stage: 2}": "deepspeed",
    "{stage: 1}": "deepspeed",
    "{strategy: fsdp1, units: blocks}": "fsdp1",
    "{strategy: zero1, overlap_with_ddp: true}": "zero1",
    "{strategy: fully_shard, fully_shard: {reshard: false}}": "fully_shard",
    "{strategy: fully_shard, fully_shard: {mp_policy: {param: bfloat16}}}": "fully_shard",
    "{strategy: fully_shard, mixed_precision: {param: bfloat16}}": "fully_shard",
    "{powersgd: {batched: true}}": "ddp",
    "{comm_hook: powerSGD, power_sgd: {rank: 4}}": "ddp",
    "{bucket_size: 50}": "ddp",
    "{megatron: {overlap_grad_reduce: true}}": "distributed_optimizer",
}


def job(ddp: str) -> Data:
    workload = {"model": "gpt2", "batch_per_rank": 2, "precision": "amp-bf16"}
    section = YAML(typ="safe", pure=True).load(ddp)
    cluster = {"machine": "dgx-a100", "nodes": 2}
    return {"schema": "ddpsim/1", "workload": workload, "ddp": section, "cluster": cluster}


@pytest.mark.parametrize("ddp", NEWCOMERS)
def test_what_newcomers_write(ddp: str) -> None:
    data = job(ddp)
    (problem,) = hints(data, ROOT)
    (followed,) = of_unknown_key(data, problem.key.split("."), problem.message)
    assert loaded(followed, ROOT).ddp.strategy == NEWCOMERS[ddp]


@pytest.mark.parametrize("kept", ["true", "false"])
def test_fsdps_words_for_resharding(kept: str) -> None:
    """FSDP1's value has another name: the message says which."""
    data = job(f"{{strategy: fsdp1, fsdp1: {{reshard_after_forward: {kept}}}}}")
    (problem,) = hints(data, ROOT)
    words = re.search(r"Write it as (\w+), where (\w+) is true and (\w+) false", problem.message)
    assert words
    data["ddp"]["fsdp1"] = {words[1]: words[2] if kept == "true" else words[3]}
    assert loaded(data, ROOT).ddp.flat.sharding_strategy == data["ddp"]["fsdp1"][words[1]]


@pytest.mark.parametrize("name", _OTHER_NAMES)
def test_other_names_of_strategies(name: str) -> None:
    """Each strategy that is offered, with the section that is offered with it."""
    (problem,) = hints(job(f"{{strategy: {name}}}"), ROOT)
    offered = re.findall(r"\b(\w+)(?: with (\w+: \{.*?\}))?", problem.message.split("write ")[1])
    known = [(word, section) for word, section in offered if word in OWN_STRATEGIES]
    assert known
    for word, section in known:
        assert loaded(job(f"{{strategy: {word}{section and ', '}{section}}}"), ROOT)


def valued(data: Data, problem: Problem) -> Data | None:
    """The scenario with what a message tells to write, or to drop, where that is one thing."""
    path, changed = problem.key.split("."), deepcopy(data)
    if meant := re.search(r"Did you mean '([^']+)'\? Wanted", problem.message):
        put(changed, path, meant[1])
    elif quoted := re.search(r"got '(.*)': drop the quotes", problem.message):
        put(changed, path, int(quoted[1]))
    elif pair := re.search(r"; write ([\w.]+): ([\w-]+)$", problem.message):
        key = pair[1].split(".")
        value = YAML(typ="safe", pure=True).load(pair[2])
        put(changed, key if key[0] in Scenario.model_fields else [*path[:-1], *key], value)
    elif re.search(r"(; drop it|, remove it|; remove it, or .*)$", problem.message):
        at(changed, path[:-1]).pop(path[-1])
    else:
        return None
    return changed


@pytest.mark.parametrize("file", INVALID, ids=lambda file: file.stem)
def test_refusals_can_be_followed(file: Path) -> None:
    """What is told of one value: written, nothing more is said of it."""
    with suppress(YAMLError):
        data = YAML(typ="safe", pure=True).load(file)
        problems = hints(data, file.parent) if isinstance(data, dict) else []
        for problem in problems:
            followed = valued(data, problem)
            known = {each.key for each in problems}
            after = hints(followed, file.parent) if followed else []
            for new in [each for each in after if each not in problems]:
                assert new.key in known or valued(followed or {}, new), (problem, new)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        *(("targets", "Write it as modules"), ("target_modules", "Write it as modules")),
        *(("r", "Write it as rank"), ("target", "Known here: rank, modules, base")),
        *(("module", "Did you mean 'modules'?"), ("dropout_rate", "Known here: rank,")),
    ],
)
def test_an_unknown_option_of_lora_is_answered_with_its_own(key: str, said: str) -> None:
    """A key of another section that is spelt nearly so is no answer."""
    data = {
        "schema": "ddpsim/1",
        "workload": {"model": "llama-8b", "batch_per_rank": 1, "lora": {key: ["q_proj"]}},
        "cluster": {"machine": "dgx-h100", "nodes": 1},
    }
    (problem,) = hints(data, ROOT)
    assert said in str(problem)
