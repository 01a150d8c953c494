"""A job of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank, in this process."""
    import torch.distributed as dist

    from calibrate.measure.ranks.launch import free_port

    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in (place | {"MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert not dist.is_initialized()
