"""Predictions held against published and recorded measurements, a module a table."""
