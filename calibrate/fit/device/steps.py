"""A record's steps as the estimate has them: on a device with given figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calibrate.records.device_record import DeviceMeasurement, DeviceRecord
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.model import Model, Work, total_s
from ddpsim.workload.roofline import zoo_model

__all__ = ["MeasuredStep", "halves", "host_s", "measured_steps"]


@dataclass(frozen=True)
class MeasuredStep:
    """A zoo model's step as it was measured, and how the estimate is asked for it."""

    measurement: DeviceMeasurement
    on_gpu: bool

    @property
    def model(self) -> str:
        """Its name in the zoo."""
        return self.measurement.case.model

    @cached_property
    def workload(self) -> Workload:
        """As a scenario would say it.

        On a CPU torch fuses no attention that drops out (sdp_utils_cpp.cpp), which is BERT's and
        GPT-2's: it is written out.
        """
        case, table = self.measurement.case, model_table(self.measurement.case.model)
        drops = case.model.startswith(("bert", "gpt2"))
        options = {
            "memory_format": "channels_last" if case.channels_last else None,
            "attention": "eager" if drops and not self.on_gpu else None,
            **({table["size"]["key"]: case.size} if table["size"] else {}),
        }
        return Workload.model_validate(
            {"model": case.model, "batch_per_rank": case.batch, "precision": case.precision}
            | {key: value for key, value in options.items() if value is not None}
        )

    def estimated(self, device: Device) -> Model:
        """The estimate on such a device."""
        return zoo_model(model_table(self.model), self.workload, device)

    def rate(self, device: Device) -> Rate:
        """The type of its matrix products."""
        return arithmetic_of(self.workload.precision, device).rate

    @property
    def parts_s(self) -> tuple[float, float, float]:
        """Seconds of forward, backward and optimizer as measured."""
        forward, backward, optimizer = (
            self.measurement.best_s(part) for part in ("forward", "backward", "optimizer")
        )
        return forward, backward, optimizer

    def predicted_s(self, device: Device) -> tuple[float, float, float]:
        """The same as estimated: each takes its device or its host, whichever is longer."""
        forward, backward, optimizer = map(max, self.device_and_host_s(device))
        return forward, backward, optimizer

    def device_and_host_s(self, device: Device) -> tuple[tuple[float, float], ...]:
        """What forward, backward and optimizer need of each, as estimated."""
        model = self.estimated(device)
        parts = (model.forward, model.backward, (model.optimizer,))
        return tuple((total_s(works), host_s(works, model.launch_s)) for works in parts)

    def operators(self, device: Device) -> tuple[int, int]:
        """Operators and kernels of forward and backward."""
        free = device.model_copy(update={"operator_s": 1.0, "kind": "gpu"})
        model = self.estimated(free)
        works = (*model.forward, *model.backward)
        return round(sum(work.host_s for work in works)), sum(work.kernels for work in works)


def host_s(works: Sequence[Work], launch_s: float) -> float:
    """What the host takes for work, its launches included."""
    return sum(work.kernels * launch_s + work.host_s for work in works)


def measured_steps(record: DeviceRecord) -> tuple[MeasuredStep, ...]:
    """The steps of a record."""
    return tuple(MeasuredStep(m, record.is_gpu) for m in record.of("step"))


def halves(steps: Sequence[MeasuredStep]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Both ways to fit on one half of the models and to predict the other.

    Every second one of each family, in the order of their worth.
    """
    names = sorted({step.model for step in steps}, key=_family_order(steps))
    even, odd = frozenset(names[::2]), frozenset(names[1::2])
    if odd:
        yield even, odd
        yield odd, even


def _family_order(steps: Sequence[MeasuredStep]) -> Any:
    first = {step.model: i for i, step in reversed([*enumerate(steps)])}
    return lambda name: (model_table(name)["family"], first[name])
