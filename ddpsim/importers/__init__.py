"""Files that others wrote, read as ddpsim's own data.

- `all_reduce`: measured all-reduce times, from any of the formats below
- `nccl`: logs of nccl-tests
- `tables`: those of OSU's osu_allreduce and of all_reduce_bench.py
- `measured`: ranks, times and bandwidths of such a file, and whether they agree
- `kineto`: traces of PyTorch's profiler
- `profiles`: what calibration found of a cluster or of a model
- `text`, `intervals`: what these share
"""
