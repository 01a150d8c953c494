"""The plain model's ticks, without events.

- `evaluator`: how a step is evaluated
- `lane`: one rank whose collectives are known, by integers
- `lanes`: many ranks and many jobs at once, in arrays
- `trials`: their instructions side by side
- `collectives`: NCCL's communication lanes, in arrays; `threads`: gloo's
- `flows`: collectives on a network that they share
- `host`: when a GPU's host launches each instruction; `batches`: when a loader's come
- `repeats`: until when steps are simulated
- `slow_periods`: work that is slowed down at times, in arrays
- `work_sums`: what works take on ranks that differ for good, summed once
"""
