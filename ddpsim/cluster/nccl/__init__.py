"""NCCL: its tuner's choice of algorithm and protocol, and what that costs."""
