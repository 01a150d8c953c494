"""A training of days with its failures: as events, as arrays and in closed form."""
