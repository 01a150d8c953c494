"""Optimizer and gradients sharded, parameters whole: ZeRO-1 and ZeRO-2.

- `zero_redundancy`: DDP with torch's ZeroRedundancyOptimizer
- `overlapping`: the same within DDP's hook, and which rank updates what
- `distributed_optimizer`: Megatron's
- `deepspeed`: DeepSpeed's stages 1 and 2; `partition`: what it sends of each bucket
"""
