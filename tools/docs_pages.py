"""The pages of the documentation that are made from the code when the site is built.

A hook of MkDocs (`hooks` in mkdocs.yml); `python tools/docs_pages.py` prints the pages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files as package_files
from typing import Any

from docs_results import results_page
from typer.main import get_command
from validation.markdown import escaped as table

from calibrate.cli import app as calibrate_app
from ddpsim.cli import app
from ddpsim.glossary import TERMS
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_duration

_SECTIONS = {  # of a scenario, in the order of the page: where each stands, by its schema's name
    "Scenario": "the whole file",
    "Workload": "workload",
    "StepTime": "workload.step_time",
    "Optimizer": "workload.optimizer",
    "Checkpointing": "workload.checkpointing",
    "Float8": "workload.float8",
    "DataLoader": "workload.data",
    "Evaluation": "workload.evaluation",
    "CheckpointWrite": "workload.checkpoint_write",
    "Ddp": "ddp",
    "FullyShard": "ddp.fully_shard",
    "MixedPrecision": "ddp.fully_shard.mixed_precision",
    "Fsdp1": "ddp.fsdp1",
    "FlatMixedPrecision": "ddp.fsdp1.mixed_precision",
    "Cluster": "cluster",
    "IntraNode": "cluster.intra_node",
    "Host": "cluster.host",
    "InterNode": "cluster.inter_node",
    "Stragglers": "cluster.stragglers",
    "OtherNode": "cluster.other_nodes",
    "Background": "cluster.background",
    "Machine": "cluster.machine",
    "Device": "cluster.device",
    "MeasuredDevice": "cluster.device.measured",
    "Run": "run",
    "Jitter": "run.jitter",
    "Stalls": "run.stalls",
    "Reliability": "reliability",
    "SilentStragglers": "reliability.stragglers",
    "Maintenance": "reliability.maintenance",
    "Spot": "reliability.spot",
}
_A_DURATION = "5 ms"  # the example that the schema gives of one


# the scenario's keys, from its JSON Schema


def scenario_page() -> str:
    """Every key of a scenario: what it takes, its default and its meaning."""
    schema = Scenario.model_json_schema(by_alias=True)
    parts = {"Scenario": schema, **schema["$defs"]}
    sections = (_section(title, parts[name]) for name, title in _SECTIONS.items())
    return "# Scenario keys\n\n" + _SCENARIO_INTRODUCTION + "\n" + "\n".join(sections)


_SCENARIO_INTRODUCTION = """\
A scenario is one YAML or JSON file, schema `ddpsim/1`. Every quantity is written with its unit;
a bare number is an error. Unknown and repeated keys are errors. Paths of files are relative to the
scenario's folder. `ddpsim schema` prints this page as JSON Schema, for completion in an editor.

A preset can be changed in single figures: `device: {preset: h100-sxm-80gb, operator: 12 us}`.
So can a device file's.
"""


def _section(title: str, part: Mapping[str, Any]) -> str:
    required = part.get("required", ())
    rows = (
        (f"`{key}`", value_of(each), _default(each, required=key in required), _meaning(each))
        for key, each in part["properties"].items()
    )
    purpose = part.get("description", "")
    return f"## {title}\n\n{purpose}\n\n" + table(("key", "value", "default", "meaning"), rows)


def _meaning(each: Mapping[str, Any]) -> str:
    return str(each.get("description", "")).rstrip(".")


def _default(each: Mapping[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    default = each.get("default")
    if {"const": "default"} in each.get("anyOf", ()):
        return "`default`"
    if default is None or default == {}:
        return "-"
    if each.get("examples") == [_A_DURATION]:
        return f"`{format_duration(default)}`"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def value_of(each: Mapping[str, Any]) -> str:
    """What a key takes, in words."""
    for several in ("anyOf", "oneOf"):
        if several in each:
            found = dict.fromkeys(value_of(one) for one in each[several])
            return ", or ".join(one for one in found if one != "null")
    if "$ref" in each:
        name = each["$ref"].rpartition("/")[2]
        title = _SECTIONS.get(name)
        return f"[{title}](#{_anchor(title)})" if title else "a preset with changes"
    if "enum" in each:
        return ", ".join(f"`{one}`" for one in each["enum"])
    if "const" in each:
        return f"`{each['const']}`"
    if "examples" in each:
        return f"such as `{each['examples'][0]}`"
    return _of_type(each)


def _of_type(each: Mapping[str, Any]) -> str:
    kind = each.get("type", "anything")
    if kind == "array":
        return f"a list of: {value_of(each['items'])}"
    if kind == "object":
        return f"a mapping to: {value_of(each.get('additionalProperties') or {})}"
    words = {"string": "text", "boolean": "`true`, `false`", "integer": "whole number"}
    return words.get(kind, kind) + _range(each)


def _range(each: Mapping[str, Any]) -> str:
    least, most = each.get("minimum"), each.get("maximum")
    above, below = each.get("exclusiveMinimum"), each.get("exclusiveMaximum")
    parts = [
        *([f"from {least:,}"] if least is not None else []),
        *([f"above {above:,}"] if above is not None else []),
        *([f"to {most:,}"] if most is not None else []),
        *([f"below {below:,}"] if below is not None and below < 2**60 else []),
    ]
    return " " + " ".join(parts) if parts else ""


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")


# the command line, from typer


def commands_page() -> str:
    """Every command with its examples, arguments and options."""
    commands: Any = get_command(app)
    return (
        "# Commands\n\n"
        + _COMMANDS_INTRODUCTION
        + "".join(
            _command(f"ddpsim {name}", command)
            for name, command in (
                *((name, each) for name, each in commands.commands.items() if name != "calibrate"),
                *_leaves("calibrate", get_command(calibrate_app)),
            )
        )
    )


_COMMANDS_INTRODUCTION = """\
Results go to stdout, notes to stderr. The exit code is 0 after success, 1 after a failure, 2 for a
wrong scenario or option. `--json` prints all figures ([fields](results.md)). `-` in the place of a
scenario reads standard input.

`ddpsim --install-completion` makes the shell complete commands and options (bash, zsh, fish,
PowerShell). It changes the shell's own start-up file. `ddpsim --show-completion` only prints it.

`python -m calibrate` and `ddpsim calibrate` are the same. Under torchrun write the first.

"""


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for inner, each in command.commands.items():
        yield from _leaves(f"{name} {inner}", each)


def _command(name: str, command: Any) -> str:
    purpose, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    text = f"## {name}\n\n{purpose.strip()}\n\n"
    if examples:
        text += f"```text\n{examples.strip()}\n```\n\n"
    rows = [_parameter(each) for each in command.params if each.name != "help"]
    return text + table(("argument", "default", "meaning"), iter(rows)) + "\n"


def _parameter(each: Any) -> tuple[str, str, str]:
    default = "required" if each.required else f"`{each.default}`"
    if each.default in (None, False, ()) and not each.required:
        default = "-"
    return f"`{_named(each)}`", default, each.help or ""


def _named(each: Any) -> str:
    """An argument, or an option's names with its value."""
    if each.param_type_name != "option":
        return str(each.metavar or each.name)
    value = "" if each.is_flag else each.metavar or ""
    return f"{', '.join((*each.opts, *each.secondary_opts))} {value}".rstrip()


# presets, from their data


def presets_page() -> str:
    """Devices and machines with the source of each figure."""
    devices, machines = _data("devices"), _data("machines")
    parts = [
        "# Machines and devices\n\n" + _PRESETS_INTRODUCTION,
        "## Machines\n",
        table(("machine", "is", "GPUs", "NICs", "network"), map(_machine, machines.items())),
        "## Devices\n",
        table(
            ("device", "is", "fp32", "fp16", "memory", "bandwidth", "NVLink or PCIe"),
            map(_device, devices.items()),
        ),
        "## Sources\n",
        *(_sources(name, each) for name, each in (*machines.items(), *devices.items())),
    ]
    return "\n".join(parts)


_PRESETS_INTRODUCTION = """\
`cluster.machine` names a machine, `cluster.device` a device; a device is also known by the name
that its driver gives. `ddpsim explain cluster NAME` draws a machine. Rates are TFLOP/s of dense
matrix products, by the precision of their inputs. A network is the bandwidth of one NIC.

The source of a machine's network names the published sweeps that tested the preset, if there are
any. CoreWeave, Lambda and others rent `hgx-h100`, `hgx-h200` and `hgx-b200`: the same as `dgx-`
machines. For AMD devices NCCL's model stands in for RCCL's.
"""


def _data(name: str) -> dict[str, Any]:
    text = package_files("ddpsim.data").joinpath(f"{name}.json").read_text("utf-8")
    return dict(json.loads(text)[name])


def _machine(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, each = item
    link = each["inter_node"]
    gbit = f"{8 * link['bandwidth_bytes_per_s'] / 1e9:.4g} Gbit/s {link['transport']}"
    gpus = f"{each['gpus_per_node']} x `{each['device']}`"
    return f"`{name}`", each["title"], gpus, str(link.get("nics_per_node", 1)), gbit


def _device(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, each = item
    peak = each["peak_flops"]
    rates = (f"{peak[rate] / 1e12:.4g}" if rate in peak else "-" for rate in ("fp32", "fp16"))
    memory = f"{each['memory_bytes'] / 2**30:.4g} GiB"
    bandwidth = f"{each['memory_bandwidth_bytes_per_s'] / 1e9:,.4g} GB/s"
    inside = each.get("intra_node")
    rate = inside and inside.get("bandwidth_bytes_per_s")
    link = f"{rate / 1e9:.4g} GB/s" if rate else "its host's" if inside else "-"
    return f"`{name}`", each["title"], *rates, memory, bandwidth, link


def _sources(name: str, each: Mapping[str, Any]) -> str:
    rows = ((f"`{key}`", _escaped(source)) for key, source in each["sources"].items())
    return f"### {name}\n\n" + table(("figure", "source"), rows)


def _escaped(text: str) -> str:
    return re.sub(r"([*_<])", r"\\\1", text)


# the glossary


def glossary_page() -> str:
    """Every term, as `ddpsim explain` prints it."""
    terms = (f"## {term}\n\n{_linked(text)}\n" for term, text in sorted(TERMS.items()))
    return "# Glossary\n\n`ddpsim explain TERM` prints the same.\n\n" + "\n".join(terms)


def _linked(text: str) -> str:
    """Pages that a text names by their place in the repository are links."""
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", _escaped(text))


PAGES: dict[str, Callable[[], str]] = {
    "reference/scenario.md": scenario_page,
    "reference/results.md": results_page,
    "reference/commands.md": commands_page,
    "reference/presets.md": presets_page,
    "reference/glossary.md": glossary_page,
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site: MkDocs calls this when it has found those that are there."""
    from mkdocs.structure.files import File  # noqa: PLC0415 -- the tests have no MkDocs

    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


if __name__ == "__main__":
    print(*(make() for make in PAGES.values()), sep="\n\n")
