"""The machine that a rank runs on: what it is, and what would spoil a measurement."""
