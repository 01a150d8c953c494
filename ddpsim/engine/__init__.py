"""The simulation: a program's instructions carried out on ranks, on an integer clock.

- `compiled`: a step, compiled once, as all of these ask for it
- `program`: the steps of a strategy, and what carries them out
- `request`: a program on ranks, and how much of it must be simulated
- `noise`: what makes ranks and steps differ, drawn from a seed
- `run`: one job, by the plain model or by a shortcut that gives the same ticks
- `batch`: many jobs at once, their steady steps or the mean alone
- `reference`: the plain model, in SimPy: every rank, every message
- `fast`: the same ticks without events, for one rank or for arrays of them
"""
