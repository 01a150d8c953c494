"""Files that others wrote, read as ddpsim's own data.

- `all_reduce`: measured all-reduce times, from any of the formats below
- `nccl`: logs of nccl-tests, and of NCCL's own debug output
- `chakra`: execution traces of Chakra
- `measured`: ranks, times and bandwidths of such a file, and whether they agree
- `kineto`: traces of PyTorch's profiler
- `training`: what training programs print, and what torch dumps
- `configs`: configs of training programs
- `prices`: what machines cost
- `profiles`: what calibration found of a cluster or of a model
- `text`: what these share
"""
