"""Measure a cluster and a model, fit what was measured, and hold predictions against it."""
