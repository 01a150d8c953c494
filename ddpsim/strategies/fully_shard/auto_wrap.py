"""Modules to shard on their own, by their size: torch's `size_based_auto_wrap_policy`.

FSDP2's `fully_shard` chooses no modules itself. Training scripts walk the model with the policy of
FSDP1: `_recursive_wrap(..., wrapper_cls=fully_shard)`. Source: torch 2.13 distributed/fsdp/wrap.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_Inside = Sequence[tuple[str, int]]  # parameters' names within a module, and their elements


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
    found: list[str] = []
    held = 0
    for name, part in _children(inside).items():
        inner, inner_elements = _chosen(f"{module}.{name}".lstrip("."), part, least)
        found += inner
        held += inner_elements
    if module and elements - held >= least and not _is_list(inside):
        return [*found, module], elements
    return found, held


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
