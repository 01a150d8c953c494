"""What the ranks send over, and what a collective costs there.

- `topology`: links, and the paths between ranks
- `algorithms`: all-reduces as messages over paths, with closed forms
- `nccl`: NCCL's tuner, and the cost of what it chooses
- `fitted`: costs from a cluster profile, which calibration made
- `wires`, `from_links`, `link_sources`: the links of a scenario or of a machine's preset
- `cost`, `transfers`, `interference`: the interface of every cost, and how one collective moves
- `network`, `build`: a scenario's cluster as one network with its cost and uncertainty
- `what_if_links`: the same network with more bandwidth or less latency
- `describe`: a cluster in words
"""
