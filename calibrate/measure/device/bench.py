"""The device under measurement: its clock, its precisions, and how samples are taken on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from calibrate.measure.clock import Clock, Mark
from ddpsim.files import no_collection
from ddpsim.scenario.device import Rate
from ddpsim.scenario.workload import Precision

DTYPES: dict[Precision | Rate, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "amp-fp16": torch.float16,
    "amp-bf16": torch.bfloat16,
}
_SAMPLE_S = {"cpu": 2e-3, "cuda": 1e-3}  # of repeated work: far above a clock's resolution
_MOST_REPEATS = 200
_FINE_S = 1e-6  # resolution below which a thread's own time can be used


class OwnTime(Clock):
    """On a CPU the time that this thread had of it: what others took meanwhile does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        fine = time.get_clock_info("thread_time").resolution <= _FINE_S
        self._read = time.thread_time if fine else time.perf_counter

    def mark(self) -> Mark:
        """The point that the work so far reaches."""
        return super().mark() if self._on_gpu else self._read()


@dataclass(frozen=True)
class Bench:
    """A device, its clocks, and the samples of one round.

    `clock` is the device's own; `wall` a usual clock, where several threads work together.
    """

    device: torch.device
    clock: Clock
    wall: Clock
    samples: int = 5
    steps: int = 3

    @classmethod
    def of(cls, device: torch.device, *, samples: int = 5, steps: int = 3) -> Bench:
        """With its clocks."""
        return cls(device, OwnTime(device), Clock(device), samples, steps)

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU, by CUDA's name for all of them."""
        return self.device.type == "cuda"

    def kernel_s(self, work: Callable[[], object]) -> tuple[float, ...]:
        """Seconds of work on the device, each sample of so many in a row that a clock tells it."""
        work()
        first_s = self._sample(work, 1)
        wanted = _SAMPLE_S[self.device.type] / max(first_s, 1e-7)
        repeats = max(1, min(_MOST_REPEATS, round(wanted)))
        with no_collection():
            return tuple(self._sample(work, repeats) for _ in range(self.samples))

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        self.clock.finish()
        if repeats > 1:
            self.clock.run_ahead(repeats * 20e-6)  # so that the device waits for no launch
        start = self.clock.mark()
        for _ in range(repeats):
            work()
        return self.clock.seconds(start, self.clock.mark()) / repeats

    def host_s(self, work: Callable[[], object], repeats: int = 100) -> tuple[float, ...]:
        """Seconds of the host for work, which the device does meanwhile or later."""
        host = OwnTime(torch.device("cpu"))
        work()
        samples = []
        with no_collection():
            for _ in range(self.samples):
                self.clock.finish()
                start = host.mark()
                for _ in range(repeats):
                    work()
                samples.append(host.seconds(start, host.mark()) / repeats)
        return tuple(samples)

    @contextmanager
    def precision(self, precision: Precision | Rate) -> Iterator[None]:
        """Autocast, and whether products in fp32 may be TF32's."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        casts = precision.startswith("amp-")
        try:
            with torch.autocast(self.device.type, DTYPES[precision], enabled=casts):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


def supported_rates(device: torch.device) -> tuple[Rate, ...]:
    """The types of matrix products that a device has units for, fp32 first.

    Source: NVIDIA, "CUDA C programming guide", compute capabilities (half from 7.0, TF32 and bf16
    from 8.0); AMD's matrix cores have both halves, and torch gives them no TF32 by default.
    """
    if device.type != "cuda":
        return ("fp32",)
    if torch.version.hip:
        return "fp32", "fp16", "bf16"
    major, _ = torch.cuda.get_device_capability(device)
    return ("fp32", "tf32", "fp16", "bf16") if major >= 8 else ("fp32", "fp16")
