"""The model's own work on one device: parameters, layers, compute time, memory.

- `model`: a model as a strategy and the clock see it
- `build`: a scenario's model, from the zoo or from files
- `roofline`, `arithmetic`, `zoo`, `roofline_sources`: estimated times of a zoo model
- `measured`, `traced`, `traced_checkpointing`: times from a profile or from a profiler's trace
- `optimizer`: time and memory of the optimizer step
- `heterogeneous`: nodes whose devices differ from the others'
"""
