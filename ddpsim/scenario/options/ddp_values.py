"""Values of the ddp section: names of hooks and strategies, torch's version, bucket caps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ddpsim.errors import shown
from ddpsim.scenario.other_strategies import other_strategies
from ddpsim.scenario.suggest import squashed

CommHook = Literal[
    "none",
    "allreduce",
    "fp16_compress",
    "bf16_compress",
    "powerSGD",
    "post_localSGD",
    "quantization_pertensor",
    "quantization_perchannel",
    "top_k",
]
OWN_STRATEGIES = (
    "ddp",
    "naive",
    "naive_flat",
    "per_parameter",
    "parameter_server",
    "local_sgd",
    "zero1",
    "distributed_optimizer",
    "deepspeed",
    "fully_shard",
    "hsdp",
    "fsdp1",
)
# seen with torch 2.13 and two processes on CPUs
FAILS_ON_GLOO = {
    "quantization_pertensor": "stops with gloo in an IndexError: an all-gather's result is a list "
    "there",
    "quantization_perchannel": "stops with gloo in an IndexError: an all-gather's result is a list "
    "there",
}
_Versions = Literal["1.4", "1.7", "2.11", "2.12", "2.13", "2.14", "2.15"]
_KNOWN_TORCH: tuple[str, ...] = get_args(_Versions)
_LARGEST_CAP = 1_000_000


def _torch_version(value: Any) -> Any:
    """`torch: 2.13` without quotes is a number to YAML, and so is 2.10, which is then 2.1."""
    version = str(value) if isinstance(value, float) else value
    if version in _KNOWN_TORCH or not isinstance(version, str):
        return version
    unquoted = " (without quotes 2.10 is the number 2.1 to YAML)" if value == 2.1 else ""
    raise ValueError(
        f"the rules of torch {shown(version)}{unquoted} are not known here; known: "
        f"{', '.join(_KNOWN_TORCH)}. Write the nearest one in quotes, its bucket rules can be "
        "used: '1.7' for 1.7 and 1.8, '2.11' for 1.9 to 2.10 (a list of caps is new in 2.11; the "
        "rest was not compared)"
    )


_KEPT = "fully_shard with fully_shard: {reshard_after_forward: false}"
_ZERO_2 = f"deepspeed with deepspeed: {{stage: 2}}, or {_KEPT}"
_OTHER_NAMES = {  # of strategies, by what others call them; the first is the likeliest
    "zero": "deepspeed, zero1 (torch), distributed_optimizer (Megatron) or fully_shard (ZeRO-3)",
    "zerooptimization": "deepspeed",
    "zero2": _ZERO_2,
    "zero3": "fully_shard",
    "fsdp": "fully_shard, which is FSDP2",
    "fsdp2": "fully_shard",
    "fullshard": "fully_shard",
    "shardgradop": _KEPT,
    **dict.fromkeys(("hybrid", "hybridshard"), "hsdp"),
    "noshard": "ddp",
    "megatron": "distributed_optimizer",
    "deepspeedstage1": "deepspeed with deepspeed: {stage: 1}",
    "deepspeedstage2": _ZERO_2,
    "deepspeedstage3": "fully_shard",
    **dict.fromkeys(("dp", "dataparallel"), "ddp, or cluster.algorithm: data_parallel"),
}


_OTHER_PARALLELISM = (
    *("tp", "tensorparallel", "pp", "pipelineparallel", "cp", "contextparallel"),
    *("sp", "sequenceparallel", "ep", "expertparallel"),
)


def strategy_meant(name: str) -> str | None:
    """The strategy that others call so, or that is called so here; None for any other word."""
    key = squashed(name)
    names_here = {squashed(strategy): strategy for strategy in OWN_STRATEGIES}
    advice = _OTHER_NAMES.get(key, names_here.get(key))
    return None if advice is None else advice.split()[0].rstrip(",")


def name_here(name: str) -> str | None:
    """What to write in place of another program's name of a strategy."""
    return _OTHER_NAMES.get(squashed(name))


def _known_strategy(value: Any) -> Any:
    """A strategy's name; of one that others call otherwise, its name here."""
    if value in OWN_STRATEGIES or not isinstance(value, str):
        return value
    if squashed(value) in _OTHER_PARALLELISM:
        raise ValueError(
            f"{shown(value)} is not modelled: cluster.replica takes data parallelism over replicas "
            "of several GPUs, with a step of one GPU's part"
        )
    if here := name_here(value):
        raise ValueError(f"{shown(value)} has another name here: write {here}")
    others = other_strategies()
    if value in others:
        return value
    expected = ", ".join(map(repr, (*OWN_STRATEGIES, *others)))
    raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


_STRATEGY_SCHEMA = {
    "anyOf": [
        {"enum": list(OWN_STRATEGIES)},
        {"pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$", "description": "of an installed package"},
    ],
    "type": "string",
}
StrategyName = Annotated[str, BeforeValidator(_known_strategy), WithJsonSchema(_STRATEGY_SCHEMA)]


def _bucket_caps(value: Any) -> float | tuple[float, ...] | None:
    if value is None or value == "default":
        return None
    caps = list(value) if isinstance(value, (list, tuple)) else [value]
    if not caps:
        raise ValueError("the list of caps is empty; write a number of MiB, or 'default'")
    for cap in caps:
        if isinstance(cap, bool) or not isinstance(cap, (int, float)):
            raise ValueError(
                f"torch takes a bare number of MiB (25 = 26 214 400 B), not {shown(cap)}; "
                "write 25, a list such as [1, 25], or 'default'"
            )
        if not 0 < cap <= _LARGEST_CAP:  # nor NaN
            raise ValueError(f"{shown(cap)} is out of range: wanted MiB above 0, to {_LARGEST_CAP}")
    listed = tuple(float(cap) for cap in caps)
    return listed if isinstance(value, (list, tuple)) else listed[0]


BucketCaps = Annotated[
    float | tuple[float, ...] | None,
    PlainValidator(_bucket_caps),
    PlainSerializer(lambda caps: "default" if caps is None else caps),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "default"},
                {"type": "null"},
                {"type": "number", "exclusiveMinimum": 0},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "number", "exclusiveMinimum": 0},
                },
            ]
        }
    ),
]


def _bucket_groups(value: Any) -> tuple[tuple[str, ...], ...] | None:
    if value is None:
        return None
    groups = list(value) if isinstance(value, (list, tuple)) else []
    for group in groups or [value]:
        names = list(group) if isinstance(group, (list, tuple)) else []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"{shown(group)} is no list of names: write a list for each flat tensor, of "
                "parameters or modules, such as [[layer4, fc], [conv1, bn1, layer1]]"
            )
    return tuple(map(tuple, groups))


BucketGroups = Annotated[
    tuple[tuple[str, ...], ...] | None,
    PlainValidator(_bucket_groups),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "minItems": 1, "items": {"type": "string"}},
                },
                {"type": "null"},
            ]
        }
    ),
]

KnownTorch = Annotated[
    _Versions, BeforeValidator(_torch_version, json_schema_input_type=_Versions | float)
]
