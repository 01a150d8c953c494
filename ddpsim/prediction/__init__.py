"""Goes from a scenario to an answer.

- `api`: what users call: load, simulate, observe
- `resolve`: a scenario and its files, checked, to a job; `parts` keeps what jobs share
- `job`: one question, ready to be simulated; `program`: the loop that every rank runs
- `uncertainty`, `interval`: how wrong each input may be, and the step with it
- `next_steps`, `stragglers`, `stretches`: changed scenarios, simulated
- `one_device`, `measured_step`: naive answers, what a measured step says, and of which scenarios
- `collective_times`: one collective over sizes
"""
