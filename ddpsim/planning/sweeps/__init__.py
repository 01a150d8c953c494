"""Sweeps over a grid of scenarios: computed, journaled, spread over executors."""
