"""Why a real job is slow: hypotheses, each simulated, ranked by what was measured.

- `diagnose`: what users call
- `measurements`: what was measured, from the text of options
- `case`: a scenario on one number of GPUs, and what it is with a change
- `hypotheses`: the table of causes, each a `hypothesis`, from `links`, `own_work` and
  `option_hypotheses`
- `predictions`: what a changed scenario predicts of each measurement, and how likely that makes it
- `facts`: what NCCL's own log and traces of ranks say of the causes
- `checks`: the cheapest observation that tells the likely causes apart
"""
