"""Units of sharding: modules with their parameters, and the model's work in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol

from ddpsim.errors import InputError, shown
from ddpsim.scenario.options.fully_shard import BySize, Units
from ddpsim.strategies.fully_shard.blocks import block_names, large_modules, names_numbers
from ddpsim.workload.model import Model, Parameter, Work, joined

ROOT = 0
_SOME = 3  # names in a message


@dataclass(frozen=True)
class Unit:
    """A module that is sharded on its own; the root has the name "".

    `parameters`: those of no unit inside it, in registration order. `begins_model`: its input is
    the model's, which needs no gradient.
    """

    name: str
    parameters: tuple[int, ...]
    begins_model: bool


class Piece(NamedTuple):
    """Work of the innermost of some units, each inside the one before it; the root is the first.

    `outputs`: elements that it hands on; 0: not known.
    """

    chain: tuple[int, ...]
    work: Work
    outputs: float = 0.0


def plan_units(model: Model, choice: Units, key: str = "ddp.fully_shard.units") -> tuple[Unit, ...]:
    """The root, then the units in registration order; raises InputError for a name of nothing.

    `key`: where the choice is.
    """
    names = [parameter.name for parameter in model.parameters]
    sizes = [(parameter.name, parameter.numel) for parameter in model.parameters]
    prefixes = named_units(sizes, choice, key)
    if choice == "blocks" and not prefixes and not names_numbers(names):
        raise InputError(
            key,
            "this model's parameters name no numbered modules (such as layers.0) to be blocks; "
            "list the modules to shard on their own, or write [] for the root alone",
        )
    first = _first_parameters(names)
    ordered = ("", *sorted(prefixes, key=lambda prefix: (first[prefix], len(prefix))))
    places = places_of(ordered)
    members: list[list[int]] = [[] for _ in ordered]
    for i, name in enumerate(names):
        members[chain_of(name, places)[-1]].append(i)
    return tuple(
        Unit(prefix, tuple(parameters), begins_model=number == ROOT or first[prefix] == 0)
        for number, (prefix, parameters) in enumerate(zip(ordered, members, strict=True))
    )


def named_units(
    sizes: Sequence[tuple[str, int]], choice: Units, key: str = "ddp.fully_shard.units"
) -> tuple[str, ...]:
    """Names of the modules that `choice` shards on their own; the root is none of them.

    `sizes`: names and elements of the model's parameters. Raises InputError at `key` for the name
    of a module that holds none, and for a size above the model's.
    """
    names = [name for name, _ in sizes]
    if choice == "blocks":
        return _blocks_of(tuple(sizes))
    if isinstance(choice, BySize):
        least, whole = choice.min_parameters, sum(numel for _, numel in sizes)
        if least > whole:
            problem = f"{least} is more than the {whole} elements of the model; write fewer"
            raise InputError(key, f"{problem}, or [] for the root alone")
        return large_modules(sizes, least)
    first = _first_parameters(names)
    for prefix in choice:
        if prefix not in first:
            raise InputError(key, _no_such_module(prefix, names))
    return choice


def chain_of(module: str, places: Mapping[str, int]) -> tuple[int, ...]:
    """The places of the units that hold a module, or a parameter, from the root inwards."""
    return tuple(places[name] for name in (*_modules(module), module) if name in places)


@lru_cache(maxsize=16)  # variants of a model have the same names
def _chains_of(names: tuple[str, ...], prefixes: tuple[str, ...]) -> list[tuple[int, ...]]:
    places = places_of(prefixes)
    return [chain_of(name, places) for name in names]


_blocks_of = lru_cache(maxsize=16)(block_names)


def places_of(prefixes: Iterable[str]) -> dict[str, int]:
    """The place of each unit among all, by its prefix."""
    return {prefix: i for i, prefix in enumerate(prefixes)}


@lru_cache(maxsize=2**15)  # variants of a model have the same names
def _modules(name: str) -> tuple[str, ...]:
    """Modules that hold one, the outermost first: "", a, a.b of a.b.c."""
    ends = [i for i, letter in enumerate(name) if letter == "."]
    return ("", *(name[:end] for end in ends)) if name else ()


def _first_parameters(names: Sequence[str]) -> dict[str, int]:
    """The first parameter of each module, by the module's name."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        for module in _modules(name):
            first.setdefault(module, i)
    return first


def _no_such_module(prefix: str, names: Sequence[str]) -> str:
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name))
    some = ", ".join(modules[:_SOME]) + (", ..." if len(modules) > _SOME else "")
    return (
        f"{shown(prefix)} holds no parameter: name a module of this model, the part of its "
        f"parameters' names before a dot (such as {some})"
        if modules
        else f"{shown(prefix)} holds no parameter: the names of this model's parameters name no "
        "modules; give workload.parameters, or leave units out"
    )


def backward_pieces(model: Model, units: Sequence[Unit]) -> list[Piece]:
    """The work before each gradient, in their order, and the tail, which is the root's."""
    chains = [*_owners(model, units), (ROOT,)]
    return [Piece(*each) for each in zip(chains, model.backward, strict=True)]


def _owners(model: Model, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """The units that each gradient's parameter is in, in the order of gradients."""
    names = tuple([model.parameters[i].name for i in model.ready_order])
    return _chains_of(names, tuple([unit.name for unit in units]))


def forward_pieces(model: Model, units: Sequence[Unit]) -> list[Piece]:
    """The forward in the order of units: as its modules are named.

    Where they are not, in the reverse of the backward's order, each unit with the share that it has
    of the backward's time (assumed).
    """
    if model.forward_modules:
        named = _chains_of(tuple(model.forward_modules), tuple([unit.name for unit in units]))
        if set[int]().union(*named) >= {ROOT}.union(*_owners(model, units)):
            outputs = model.forward_outputs or [0.0] * len(named)
            return [Piece(*each) for each in zip(named, model.forward, outputs, strict=True)]
    return list(_mirrored(model, backward_pieces(model, units)))


def _mirrored(model: Model, backward: Sequence[Piece]) -> Iterator[Piece]:
    whole = joined(model.forward) if model.forward else Work(0.0)
    host_s = whole.kernels * model.launch_s + whole.host_s
    alike = [
        (chain, sum(piece.work.device_s for piece in pieces))
        for chain, pieces in groupby(backward, key=lambda piece: piece.chain)
    ]
    total_s = sum(device_s for _, device_s in alike)
    for chain, device_s in reversed(alike):
        share = device_s / total_s if total_s else 1 / len(alike)
        yield Piece(chain, Work(share * whole.device_s, 0, share * host_s))


def spans(chains: Iterable[tuple[int, ...]]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the units that begin in each piece, and the last piece of each unit.

    `chains`: of each piece, the units that it is in, from the root inwards.
    """
    begun: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for i, chain in enumerate(chains):
        begun[i] = [unit for unit in chain if unit not in last]
        last.update(dict.fromkeys(chain, i))
    return begun, last


class _Mixed(Protocol):
    """Types of MixedPrecision of either FSDP; None: as the parameters are."""

    @property
    def param(self) -> str | None:
        """The type of what is gathered."""

    @property
    def reduce(self) -> str | None:
        """The type of what is reduced."""


def dtypes_of(
    unit: Unit, parameters: Sequence[Parameter], mixed: _Mixed, key: str
) -> tuple[str, str, str]:
    """The dtypes of a unit's shards, of what is gathered, and of what is reduced.

    Raises InputError at `key`.units where its `parameters` are of several types: torch's FSDP1
    flattens those of one, and fully_shard wants one.
    """
    dtypes = sorted({parameter.dtype for parameter in parameters}) or ["float32"]
    if len(dtypes) > 1:
        of = f"unit {unit.name}" if unit.name else "the root"
        raise InputError(
            f"{key}.units",
            f"{of} has parameters of {' and '.join(dtypes)}: torch takes one dtype in a unit; "
            "name units of one each",
        )
    sent = mixed.param or dtypes[0]
    return dtypes[0], sent, mixed.reduce or sent
