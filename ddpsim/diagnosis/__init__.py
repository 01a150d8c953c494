"""Why a real job is slow: hypotheses, each simulated, ranked by what was measured.

- `diagnose`: what users call
- `measurements`: what was measured, from the text of options
- `hypotheses`: the table of causes; `inside_nodes`, `between_nodes`, `own_work`: their changes
- `predictions`: what a changed scenario predicts of each measurement
- `posterior`: how likely a prediction makes what was measured
- `checks`: the cheapest observation that tells the likely causes apart
"""
