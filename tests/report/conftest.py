"""Storyboards that several tests of the page draw, made once."""

from __future__ import annotations

import pytest
from page_reading import board_storyboard, gloo_storyboard, measured_storyboard, noisy_storyboard

from ddpsim.result.storyboard import Storyboard


@pytest.fixture(scope="session")
def board() -> Storyboard:
    return board_storyboard()


@pytest.fixture(scope="session")
def noisy() -> Storyboard:
    return noisy_storyboard()


@pytest.fixture(scope="session")
def gloo() -> Storyboard:
    return gloo_storyboard()


@pytest.fixture(scope="session")
def measured() -> Storyboard:
    return measured_storyboard()
