"""Modules that scripts shard on their own: blocks, by parameters' names, or modules by size.

torch's tutorials wrap each module of a list (`for layer in model.layers: fully_shard(layer)`), and
no single convolution or linear layer of an nn.Sequential. Others walk the model with FSDP1's
`size_based_auto_wrap_policy`: `_recursive_wrap(..., wrapper_cls=fully_shard)` (torch 2.13
distributed/fsdp/wrap.py).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

_Inside = Sequence[tuple[str, int]]  # parameters' names within a module, and their elements

_NUMBERED = re.compile(r"(.*_)?\d+")  # the name of a module in a list of them
_OF_ONE_LAYER = {"weight", "bias"}
_LEAST = 2  # layers with a matrix that make a sequence a block


def block_names(sizes: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Blocks in the order of their first parameters, the outermost of each parameter.

    A block is a numbered module of several layers, such as layers.0 or encoder_layer_0, whose
    numbered siblings are all such, or one of which holds the same. So is a sequence of layers that
    the model repeats outside of those, such as the double convolutions of a U-Net. `sizes`: names
    and elements of the model's parameters.
    """
    modules = _Modules(sizes)
    owners = {name: next(filter(modules.is_block, _holders(name)), None) for name, _ in sizes}
    outside = _Modules((name, numel) for name, numel in sizes if owners[name] is None)
    for name in outside.names:
        owners[name] = next(filter(outside.is_repeated_sequence, _holders(name)), None)
    return tuple(dict.fromkeys(block for block in owners.values() if block is not None))


def names_numbers(names: Iterable[str]) -> bool:
    """Whether a parameter is in a numbered module."""
    return any(_is_numbered(module) for name in names for module in _holders(name))


class _Modules:
    """What each module of a model holds, by the names and sizes of parameters."""

    def __init__(self, sizes: Iterable[tuple[str, int]]) -> None:
        self.names: list[str] = []
        self._held: dict[str, dict[str, int]] = defaultdict(dict)
        for name, numel in sizes:
            self.names.append(name)
            for module in _holders(name):
                self._held[module][name[len(module) + 1 :]] = numel
        self._makes = {module: frozenset(held) for module, held in self._held.items()}
        self._numbered = defaultdict(list)  # by the module that holds them
        for module in filter(_is_numbered, self._held):
            self._numbered[_parent(module)].append(module)

    def is_block(self, module: str) -> bool:
        """Whether it is a numbered module of several layers, among others."""
        if not _is_numbered(module) or self._is_layer(module):
            return False
        siblings = self._numbered[_parent(module)]
        alike = sum(self._makes[each] == self._makes[module] for each in siblings)
        return alike > 1 or not any(map(self._is_layer, siblings))

    def is_repeated_sequence(self, module: str) -> bool:
        """Whether it holds numbered layers alone, as another one does."""
        return self._sequences[self._makes[module]] > 1 and self._is_sequence(module)

    @cached_property
    def _sequences(self) -> Counter[frozenset[str]]:
        return Counter(self._makes[module] for module in self._held if self._is_sequence(module))

    def _is_layer(self, module: str) -> bool:
        return self._makes[module] <= _OF_ONE_LAYER

    def _is_sequence(self, module: str) -> bool:
        numbered = self._numbered.get(module, ())
        layers = [each for each in numbered if _is_decimal(each) and self._is_layer(each)]
        whole = sum(len(self._held[layer]) for layer in layers) == len(self._held[module])
        return whole and sum(map(self._has_matrix, layers)) >= _LEAST

    def _has_matrix(self, layer: str) -> bool:
        """Not a norm, whose weight is as long as its bias."""
        held = self._held[layer]
        return "weight" in held and held["weight"] != held.get("bias")


def _is_numbered(module: str) -> bool:
    return _NUMBERED.fullmatch(module.rpartition(".")[2]) is not None


def _is_decimal(module: str) -> bool:
    """Whether it may be in an nn.Sequential."""
    return module.rpartition(".")[2].isdecimal()


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _holders(name: str) -> Iterator[str]:
    """Modules that hold a parameter, the outermost first: a, a.b of a.b.c."""
    return (name[:end] for end, letter in enumerate(name) if letter == ".")


def large_modules(parameters: Iterable[tuple[str, int]], least: int) -> tuple[str, ...]:
    """Names of modules that hold so many elements outside the chosen ones inside them.

    Inner ones come first; the model itself is none. `parameters`: names and elements.
    """
    return tuple(_chosen("", list(parameters), least)[0])


def _chosen(module: str, inside: _Inside, least: int) -> tuple[list[str], int]:
    """Modules in this one, itself too, and how many elements they hold."""
    elements = sum(numel for _, numel in inside)
    if elements < least or _is_attention(inside):
        return [], 0
    modules: list[str] = []
    held = 0
    for name, part in _children(inside).items():
        inner, inner_elements = _chosen(f"{module}.{name}".lstrip("."), part, least)
        modules += inner
        held += inner_elements
    if module and elements - held >= least and not _is_list(inside):
        return [*modules, module], elements
    return modules, held


def _children(inside: _Inside) -> dict[str, list[tuple[str, int]]]:
    children: dict[str, list[tuple[str, int]]] = {}
    for name, numel in inside:
        child, dot, rest = name.partition(".")
        if dot:
            children.setdefault(child, []).append((rest, numel))
    return children


def _is_attention(inside: _Inside) -> bool:
    """An nn.MultiheadAttention stays whole (FORCE_LEAF_MODULES)."""
    return any(name == "in_proj_weight" for name, _ in inside)


def _is_list(inside: _Inside) -> bool:
    """An nn.ModuleList has no forward (EXCLUDE_WRAP_MODULES): numbered modules and nothing else.

    So has an nn.Sequential, which the names alone do not tell from it.
    """
    return all(name.partition(".")[0].isdecimal() and "." in name for name, _ in inside)
