"""A training of days with its failures: as arrays."""
