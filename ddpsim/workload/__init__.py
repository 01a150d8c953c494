"""The model's own work on one device: parameters, layers, compute time, memory.

- `model`: a model as a strategy and the clock see it
- `build`: a scenario's model, from the zoo or from files
- `operators`: what a captured model's step launches
- `roofline`, `arithmetic`, `zoo`: estimated times of a captured model
- `measured`, `traced`: times from a profile or from a profiler's trace
- `optimizer`: time and memory of the optimizer step
- `heterogeneous`: nodes whose devices differ from the others'
"""
