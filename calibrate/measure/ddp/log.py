"""What DDP's own logger says of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

__all__ = ["Log", "logged", "start_log"]


class Log(NamedTuple):
    """The last iteration, as `calibrate.records.rounds.Logged` has it, and the buckets in use.

    `bucket_bytes` are in the order in which buckets are reduced.
    """

    forward_s: float
    backward_compute_s: float
    comm_s: float
    overlap_s: float
    bucket_bytes: tuple[int, ...]


class _LaterLogger:
    """DDP's logger, which sums up an iteration when `logged` asks for it and not before.

    DDP does so as the next forward begins, for one iteration in a hundred. Were it done for each,
    every forward would take longer, by 0.2 to 0.3 us a parameter.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """What DDP calls in each forward."""

    def sum_up(self) -> None:
        """What it does otherwise."""
        self._logger.set_runtime_stats_and_log()


def start_log(ddp: DistributedDataParallel) -> None:
    """Have DDP log every iteration, at no cost to its forward; one in a hundred is its default."""
    ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # noqa: SLF001
    ddp.logger = _LaterLogger(ddp.logger)


def logged(ddp: DistributedDataParallel) -> Log:
    """The last iteration of one whose log was started; 0 s and no buckets if DDP says nothing."""
    ddp.logger.sum_up()  # type: ignore[union-attr]
    found: Mapping[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001

    def seconds(key: str) -> float:
        return float(found.get(key, 0)) * 1e-9

    sizes = str(found.get("rebuilt_bucket_sizes") or found.get("bucket_sizes", ""))
    return Log(
        forward_s=seconds("forward_compute_time"),
        backward_compute_s=seconds("backward_compute_time"),
        comm_s=seconds("backward_comm_time"),
        overlap_s=seconds("backward_compute_comm_overlap_time"),
        bucket_bytes=tuple(int(size) for size in sizes.split(",") if size.strip()),
    )
