"""Profiles that calibration wrote: of a cluster, of a model."""
