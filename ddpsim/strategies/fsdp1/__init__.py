"""torch's FullyShardedDataParallel (FSDP1): the parameters of a unit are one flat parameter.

- `flat`: how long a unit's flat parameter is, what it sends, and what that costs
- `step`: one step, as torch's hooks order it
- `strategy`: the strategy; units, memory and offloading are those of `fully_shard`
"""
