"""A cluster's microbenchmarks: the plan, the rounds of each task, the session."""
