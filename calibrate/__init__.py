"""Measure a cluster and a model, fit what was measured, and hold predictions against it.

Nothing can be measured yet: this release of ddpsim predicts from presets, logs and profiles.
"""
