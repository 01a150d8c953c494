"""Settings that take back the options of a strategy where another one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpsim.scenario.ddp import OF_DDP_ALONE, OF_STRATEGIES, OMIT_SYNC, WRAPPED, Ddp
from ddpsim.scenario.other_strategies import other_strategies
from ddpsim.settings import setting

_NEWER = "forward_sync_buffers"  # a name of broadcast_buffers, as sections are written
_DEFAULT = {key: field.default for key, field in Ddp.model_fields.items()} | {_NEWER: True}
# settings that take back what is DDP's alone; a cap that is not stated is torch's default
_USUAL = {key: setting(f"ddp.{key}", _DEFAULT[key]) for key in (*OF_DDP_ALONE, _NEWER)}
_USUAL["bucket_cap_mb"] = "ddp.bucket_cap_mb=default"


def set_aside(ddp: Mapping[str, Any], strategy: str, *, clips: bool = False) -> tuple[str, ...]:
    """Settings that take back the options of the section `ddp` that only other strategies have.

    An empty strategy takes back those of all. `clips`: the loop clips gradients, which DeepSpeed
    does itself.
    """
    others = [key for key, owners in OF_STRATEGIES.items() if strategy not in owners]
    if strategy not in other_strategies():
        others.append("options")
    settings = () if strategy in WRAPPED else _without_ddp_options(ddp)
    settings += tuple(f"ddp.{key}=null" for key in others if ddp.get(key) is not None)
    if ddp.get("no_sync") is False and strategy not in ("", *OMIT_SYNC):
        settings += ("ddp.no_sync=true",)
    if clips and strategy == "deepspeed":
        settings += ("workload.clip_grad_norm=null",)
    return settings


def _without_ddp_options(ddp: Mapping[str, Any]) -> tuple[str, ...]:
    stated = (key for key in _USUAL if ddp.get(key, _DEFAULT[key]) != _DEFAULT[key])
    return tuple(_USUAL[key] for key in stated)


def as_ddp(ddp: Ddp) -> tuple[str, ...]:
    """DDP, without the options of another strategy; nothing where it is DDP."""
    if ddp.strategy == "ddp":
        return ()
    return ("ddp.strategy=ddp", *set_aside(dict(ddp), "ddp"))
