"""Testbeds of tests: their files and names, and whether this machine permits one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from measured.testbeds import made_of, shell, why_no_network

from calibrate.testbed import network, state


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Files of their own: tests at once on one machine would tidy up after each other."""
    folder = tmp_path / "run"
    monkeypatch.setattr(state, "FOLDER", folder)
    monkeypatch.setenv("TESTBED_FOLDER", str(folder))
    return folder


@pytest.fixture(scope="session")
def permitted() -> None:
    reason = why_no_network()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def name(permitted: None) -> Iterator[str]:
    """A testbed's name; whatever has it is gone after the test, and the machine is as before."""
    name = f"test{os.getpid()}"
    links, routes = shell("ip -o link"), shell("ip route show table all")
    yield name
    left = made_of(name)
    for namespace in left:
        shell(f"ip netns delete {namespace}", check=False)
    assert left == []
    assert (shell("ip -o link"), shell("ip route show table all")) == (links, routes)


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked after root and the tools: as if both were there."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
