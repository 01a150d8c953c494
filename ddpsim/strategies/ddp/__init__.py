"""torch's DistributedDataParallel.

- `strategy`: one step: buffers, hooks, reducer, optimizer
- `reducer`: buckets fill, are sent in order, and are waited for
- `buckets`: which parameters share a bucket, before and after the rebuild
- `costs`: what hooks, copies and communication hooks take
- `compiled_graphs`: when gradients are ready under torch.compile
"""
