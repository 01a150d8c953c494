"""Parameters, gradients and optimizer sharded over ranks: torch's `fully_shard` (FSDP2).

- `units`: modules that are sharded on their own, and the model's work in their order
- `blocks`: which modules those are, by name or by size
- `groups`: what a unit sends, what that costs, and what it holds
- `muon`: its products, as DTensor spreads them over shards
- `unit_step`: what a step of FSDP1 and one of FSDP2 have in common, and copies to the host
- `step`: one step, as torch's hooks order it
- `sharded`: what the strategies of FSDP1 and FSDP2 have in common
- `strategy`: the strategy, and casts of what units hand on
"""
