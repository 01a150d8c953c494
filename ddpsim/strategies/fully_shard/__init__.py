"""Parameters, gradients and optimizer sharded over ranks: torch's `fully_shard` (FSDP2).

- `units`: modules that are sharded on their own, and the model's work in their order
- `groups`: what a unit sends, what that costs, and what it holds
- `step`: one step, as torch's hooks order it
- `strategy`: the strategy
"""
