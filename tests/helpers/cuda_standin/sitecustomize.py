"""A stand-in for CUDA and NCCL, in every Python that has this folder on its path.

Tensors that are asked for on a GPU live on the CPU, kernels are done when they return, and NCCL is
gloo: so what calibrate does on GPUs runs, call by call, where there is none. It tells nothing of
times, streams or what NCCL does. `STANDIN_GPUS` says how many devices are seen, `STANDIN_GPU`
whose number all of them have; `STANDIN_FAILS` "1 AcceleratorError" has rank 1's fail at a copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from calibrate.measure.cluster import rounds

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Devices in a call become the CPU; only a device itself still says what was asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is not torch.device:
            args = tuple(_on_cpu(value) for value in args)
            kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _on_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return _CPU if is_gpu else value


class Event:
    """Of a stream that has always done all of its work."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._timed, self._at_s = enable_timing, 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self._at_s, "never recorded"

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._timed
        assert end._timed
        return 1e3 * (end._at_s - self._at_s)


class Stream:
    """A stream that has always done all of its work."""

    def __init__(self, _device: torch.device | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def _stream(_: Stream) -> Iterator[None]:
    yield


def _set_device(device: torch.device | int) -> None:
    """As torch does, which wants to know which one."""
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")


def _install() -> None:
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream = Event, Stream, _stream
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("STANDIN_GPUS", "2"))
    # torch._dynamo knows each by its name, and wants no function under two
    cuda.set_device, cuda.synchronize = _set_device, lambda _device: None
    cuda._sleep = lambda _cycles: None
    cuda.current_stream = partial(Stream)
    cuda.mem_get_info = lambda _device: (8 * 2**30, 16 * 2**30)
    cuda.max_memory_allocated = lambda _device: 2**28
    cuda.reset_peak_memory_stats = lambda _device: None
    cuda.is_bf16_supported = lambda **_: True
    cuda.get_device_capability = lambda _device: (8, 0)
    cuda.get_device_name = lambda _device: "NVIDIA A100-SXM4-80GB"
    number = os.environ.get("STANDIN_GPU", os.environ.get("RANK", "0"))
    cuda.get_device_properties = lambda _device: SimpleNamespace(
        uuid=f"GPU-{number}", total_memory=16 * 2**30
    )
    cuda.nccl.version = lambda: (2, 27, 5)
    _install_nccl()
    rounds._GEMM["cuda"], rounds._MEMORY["cuda"] = 64, (2**12, 4)
    rounds._LAYERS["cuda"] = (4, 64, 32)
    rounds._QUEUED, rounds._MOST_QUEUED = 2, 2
    rounds._MESSAGE_BYTES["cuda"] = 2**22
    _OnCpu().__enter__()
    rank, _, error = os.environ.get("STANDIN_FAILS", "").partition(" ")
    if rank and rank == os.environ.get("RANK"):
        rounds._BUILDERS["device_copy"] = partial(_fail, error)


def _fail(error: str, *_: Any) -> Any:
    if error == "AcceleratorError":
        raise torch.AcceleratorError("CUDA error: it fell off the bus\nfor debugging ...")
    raise dist.DistBackendError("NCCL error in: here\nLast error:\nDuplicate GPU detected\n")


def _install_nccl() -> None:
    """Of the world alone; other groups have the backend that they were made with."""
    begin, backend_of, world = dist.init_process_group, dist.get_backend, ["nccl"]

    def init_process_group(backend: str, **options: Any) -> None:
        world[0] = backend
        begin("gloo", **options)

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        return world[0] if group is None else str(backend_of(group))

    distributed: Any = dist
    distributed.init_process_group, distributed.get_backend = init_process_group, get_backend
    distributed.is_nccl_available = lambda: True


_install()
