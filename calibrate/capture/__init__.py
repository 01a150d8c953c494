"""A model's training step recorded from its code, with no device: shapes flow, no memory is used.

- `shapes`: the mode that runs operators on shapes alone
- `cuda_operators`: the operators that CUDA runs, autocast's casts among them
- `describe`: one operator call as its kind, dimensions, FLOPs and bytes
- `record`: one step, row by row, and what its blocks keep for the backward
- `capture`: a model's document, of steps of its `sources`
"""
