"""Shapes and bytes that torch's Muon launches for one matrix whose rows ranks share out, on CPUs.

There DTensor has no all-to-all: it gathers in its place, and cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from two_ranks import run_as_rank

CASES = [
    *(
        ((rows, columns), per_node)
        for rows, columns in ((64, 256), (96, 96))
        for per_node in (1, 8)
    ),
    ((256, 64), 1),
    ((64, 4096), 8),
    ((50, 30), 8),
]


def observe(shape: tuple[int, int], per_node: int) -> dict[str, Any]:
    """Two iterations, as of nodes of so many GPUs; and whether Adafactor stops."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, _collective_utils, distribute_tensor

    resources: Any = _collective_utils._mesh_resources
    resources.num_devices_per_host = lambda _: per_node
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrix = torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
    matrix.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
    called = _recorded(torch.optim.Muon([matrix], ns_steps=2).step)
    stopped = ""
    try:
        torch.optim.Adafactor([matrix]).step()
    except RuntimeError as error:
        stopped = str(error)
    return {"shape": shape, "per_node": per_node, "called": called, "adafactor": stopped}


def _recorded(step: Callable[[], Any]) -> list[list[Any]]:
    """Products as m, n and k, and collectives as the bytes that they are given."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[list[Any]] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's own are untyped
            self, operator, types, args=(), kwargs=None
        ):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            name = operator.__name__.partition(".")[0]
            if not any(isinstance(one, FakeTensor) for one in tensors):
                if name in ("mm", "addmm"):
                    first, second = tensors[-2:]
                    called.append([name, first.shape[0], second.shape[1], first.shape[1]])
                elif str(operator).startswith("_c10d_functional.") and "wait" not in name:
                    name = name.removesuffix("_tensor").removesuffix("_into")
                    called.append([name, prod(tensors[0].shape) * tensors[0].element_size()])
            return operator(*args, **(kwargs or {}))

    with Log():
        step()
    return [one for one in called if not one[0].startswith("_wrap")]


if __name__ == "__main__":
    run_as_rank(observe, CASES, sends=False)
