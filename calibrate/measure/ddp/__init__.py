"""Real DDP iterations, in rounds, over bucket caps and options."""
