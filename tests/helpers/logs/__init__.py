"""Logs and traces for tests of importers."""
