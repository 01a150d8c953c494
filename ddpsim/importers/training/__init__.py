"""What training programs and torch itself say of a job: step lines, states, dumps.

- `step_lines`: lines with a step's time, by a pattern for each program; trainer_state.json
- `bars`: progress bars, and which of them is training's; runs, and the steady step of one
- `from_torch`: dumps of PyTorch's flight recorder, and what DDP logs of itself
"""
