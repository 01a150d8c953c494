"""Hypothesis strategies for small models, DDP options and clusters."""

from __future__ import annotations

from math import isqrt
from typing import Any

from hypothesis import strategies as st

from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import BatchNorm, Buffer, Model, Parameter, Work

_SECONDS = st.floats(0, 2e-3, allow_nan=False)


def _shape(numel: int) -> tuple[int, int]:
    """Extents of a matrix of about so many elements, whose rows are cut as torch cuts them."""
    return isqrt(numel), numel // isqrt(numel)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model of up to ten parameters, some unused, with arbitrary ready order and times.

    Some of its rows are batch norms.
    """
    numels = draw(st.lists(st.integers(1, 400_000), min_size=1, max_size=10))
    order = tuple(draw(st.permutations(range(len(numels)))))
    order = order[draw(st.integers(0, len(order) - 1)) if draw(st.booleans()) else 0 :]
    works = st.builds(Work, _SECONDS, st.integers(0, 6), st.sampled_from([0.0, 0.0, 3e-5]))
    count = len(order) + 1
    buffers = st.builds(Buffer, st.sampled_from(["float32", "int64"]), st.integers(1, 999))
    forward = tuple(draw(st.lists(works, min_size=1, max_size=3)))
    norms = draw(st.integers(0, min(len(forward), len(order))))
    return Model(
        parameters=tuple(
            Parameter(f"m.{i // 3}.p{i}", numel, "float32", shape=_shape(numel))
            for i, numel in enumerate(numels)
        ),
        ready_order=order,
        buffers=tuple(draw(st.lists(buffers, max_size=2))),
        forward=forward,
        backward=tuple(draw(st.lists(works, min_size=count, max_size=count))),
        optimizer=draw(works),
        launch_s=draw(st.sampled_from([0.0, 5e-6, 4e-5])),
        activation_bytes=None,
        basis="measured",
        provenance=(),
        batch_norms=tuple(
            BatchNorm(f"norm {i}", draw(st.integers(1, 3000)), i, norms - 1 - i)
            for i in range(norms)
        ),
    )


@st.composite
def scenarios(
    draw: st.DrawFn, max_nodes: int = 3, *, noisy: bool = False, gloo: bool | None = None
) -> Scenario:
    """A scenario on a few ranks; its model is a placeholder for one of `models`."""
    gloo = draw(st.booleans()) if gloo is None else gloo
    nodes = draw(st.integers(1, max_nodes))
    gpus = draw(st.integers(1, 3))
    latencies = st.integers(0, 50).map(lambda us: f"{us} us")
    rates = st.integers(1, 400).map(lambda tenths: f"{tenths / 10} GB/s")
    cluster: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "device": "cpu-core" if gloo and draw(st.booleans()) else "a100-sxm-40gb",
        "intra_node": {"bandwidth": draw(rates), "latency": draw(latencies)},
        "inter_node": {"bandwidth": draw(rates), "latency": draw(latencies)},
    }
    ddp = draw(ddp_options()) | {"backend": "gloo" if gloo else "nccl"}
    if not ddp["join"]:
        ddp["reduced_again"] = draw(st.sampled_from([None, None, "hooks", "after_backward"]))
    if not gloo and draw(st.integers(0, 3)) == 0:
        ddp |= draw(st.sampled_from(STAGED_HOOKS))
    run: dict[str, Any] = {"iterations": 2, "seed": draw(st.integers(0, 99))}
    if noisy:
        cluster["stragglers"] = {"distribution": "lognormal", "sigma": draw(st.floats(0.01, 0.5))}
        run["jitter"] = {"sigma": draw(st.floats(0, 0.3))}
    return Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "resnet18",
                "batch_per_rank": 1,
                "data": draw(loaders()),
                "sync_batch_norm": not gloo and not ddp["join"] and draw(st.integers(0, 3)) == 0,
                "set_to_none": draw(st.booleans()),
                "input_copy": None if gloo else draw(input_copies()),
                **draw(loop_options()),
            },
            "ddp": ddp,
            "cluster": cluster,
            "run": run,
        }
    )


STAGED_HOOKS: list[dict[str, Any]] = [
    {"comm_hook": "powerSGD"},
    {"comm_hook": "powerSGD", "power_sgd": {"batched": True, "matrix_approximation_rank": 3}},
    {"comm_hook": "quantization_pertensor"},
    {"comm_hook": "quantization_perchannel"},
    {"comm_hook": "top_k"},
]


def loaders() -> st.SearchStrategy[dict[str, Any] | None]:
    """No loader, or one that may be too slow."""
    rates = st.integers(50, 3000).map(lambda rate: {"rate": f"{rate} samples/s"})
    return st.one_of(st.none(), st.none(), rates)


def input_copies() -> st.SearchStrategy[dict[str, Any] | None]:
    """No copy, one for which the host waits, or one for which it does not."""
    runs_ahead = {"sample_size": "4 MB", "pinned": True, "non_blocking": True}
    return st.sampled_from([None, None, {"sample_size": "40 MB"}, runs_ahead])


def loop_options() -> st.SearchStrategy[dict[str, Any]]:
    """Nothing, or what a loop does around the optimizer, with the host's waits for the device."""
    every_option = st.fixed_dictionaries(
        {
            "precision": st.sampled_from(["fp32", "amp-fp16"]),
            "optimizer": st.sampled_from([{"fused": True}, {}]),
            "clip_grad_norm": st.sampled_from([None, True, {"error_if_nonfinite": True}]),
            "read_loss_every": st.sampled_from([None, 1, 2, 3]),
            "barrier_every": st.sampled_from([None, None, 1, 2]),
        }
    )
    return st.just({}) | every_option


def ddp_options() -> st.SearchStrategy[dict[str, Any]]:
    """Every option that changes what a rank does."""
    return st.fixed_dictionaries(
        {
            "bucket_cap_mb": st.sampled_from(["default", 0.01, 0.5, 25, [0.1, 1]]),
            "gradient_as_bucket_view": st.booleans(),
            "find_unused_parameters": st.booleans(),
            "static_graph": st.booleans(),
            "broadcast_buffers": st.booleans(),
            "comm_hook": st.sampled_from(["none", "allreduce", "fp16_compress"]),
            "accumulation_steps": st.integers(1, 3),
            "join": st.sampled_from([None, None, True, {"divide_by_initial_world_size": False}]),
        }
    )
