"""What a job does once, before its first step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartUp:
    """What comes before the first step, and is part of none.

    DDP's constructor broadcasts parameters and buffers, `broadcast_bytes` in `broadcast_s`; None
    with another strategy, or where a broadcast has no price. `communicator_s`: within which NCCL
    makes its communicator, as published for about as many ranks; None with gloo. The launcher's
    rendezvous and the load of the model are not in it.
    """

    broadcast_bytes: int | None
    broadcast_s: float | None
    communicator_s: tuple[float, float] | None
