"""A testbed's parts that need no network: cores, rates, states, subnets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from measured.testbeds import GBIT

from calibrate.testbed import network, shaping, state


def test_a_set_of_one_core_as_the_kernel_reads_it() -> None:
    assert network._core_mask(0) == "00000001"
    assert network._core_mask(31) == "80000000"
    assert network._core_mask(33) == "00000002,00000000"


def test_burst() -> None:
    with_fine_timer, with_ticks = 1e9, 250.0
    assert shaping.burst_bytes(GBIT, with_fine_timer) == 131_072
    assert shaping.burst_bytes(10 * GBIT, with_fine_timer) == 131_072
    assert shaping.burst_bytes(40 * GBIT, with_fine_timer) == 500_000
    assert shaping.burst_bytes(2 * GBIT, with_ticks) == 1_000_000  # rate / HZ
    assert shaping.burst_bytes(1e3, with_ticks) == 131_072


@pytest.mark.parametrize(
    ("text", "burst"),
    [
        ("000003e8 00000040 000f4240 3b9aca00", 131_072),  # high-resolution timers
        ("000003e8 00000040 000f4240 000000fa", 1_000_000),  # HZ=250
        ("000003e8", 2_500_000),  # unknown: HZ=100
        (None, 2_500_000),
    ],
)
def test_tbf_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, burst: int
) -> None:
    path = tmp_path / "psched"
    if text:
        path.write_text(text)
    monkeypatch.setattr(shaping, "_PSCHED", path)
    assert shaping.tbf_arguments(2 * GBIT) == f"tbf rate 2000000000bit burst {burst} latency 20ms"


def test_an_owner_is_alive_until_it_ends() -> None:
    assert state.this_process().alive
    child = subprocess.Popen(["sleep", "60"])
    owner = state.Owner(pid=child.pid, start_ticks=state._start_ticks(child.pid) or 0)
    assert owner.alive
    assert not owner.model_copy(update={"start_ticks": owner.start_ticks - 1}).alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.alive  # a zombie
    child.wait()
    assert not owner.alive


def test_a_state_survives_its_file() -> None:
    saved = state.State(
        name="lab", subnet="10.77.0", rates_bytes_per_s=(1e6,), owner=state.this_process()
    )
    state.save(saved)
    assert state.load_states() == [saved]
    state.forget(saved)
    state.forget(saved)
    assert state.load_states() == []


def test_a_subnet_that_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = '[{"dst":"default"},{"dst":"10.0.0.0/8"},{"dst":"10.77.0.0/17"},{"dst":"10.77.128.9"}]'
    monkeypatch.setattr(network, "_run", lambda _: routes)
    other = state.State(name="lab", subnet="10.77.129", rates_bytes_per_s=(1e6,))
    assert network._free_subnet([other]) == "10.77.130"
    monkeypatch.setattr(network, "_run", lambda _: "")
    assert network._free_subnet([]) == "10.77.0"
