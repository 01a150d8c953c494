"""Parameters, gradients and optimizer sharded over ranks: torch's `fully_shard` (FSDP2).

- `units`: modules that are sharded on their own, and the model's work in their order
- `auto_wrap`: modules by their size
- `groups`: what a unit sends, what that costs, and what it holds
- `offload`: copies between host and device
- `unit_step`: what a step of FSDP1 and one of FSDP2 have in common
- `step`: one step, as torch's hooks order it
- `sharded`: what the strategies of FSDP1 and FSDP2 have in common
- `strategy`: the strategy
"""
