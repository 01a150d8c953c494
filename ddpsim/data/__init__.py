"""Presets: devices, machines, and the parameters of models."""
