"""What was measured, as files: records of microbenchmarks, rounds of real DDP."""
