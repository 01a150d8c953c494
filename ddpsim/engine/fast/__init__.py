"""The same ticks as the plain model's, without events.

- `host`: when a GPU's host launches each instruction
- `scalar`: one rank whose collectives are known
- `vectorised`: many ranks and many jobs at once, in arrays
- `flows`: collectives on a network that they share
- `host_ranks`: ranks whose hosts compute themselves
- `slow_periods`: work that is slowed down at times, in arrays
- `work_sums`: what works take on ranks that differ for good, summed once
"""
