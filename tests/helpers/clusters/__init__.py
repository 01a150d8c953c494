"""Clusters for tests: measured profiles, and the times of collectives."""
