"""What training programs and torch itself say of a job: step lines, states, dumps.

- `step_lines`: lines with a step's time, by a pattern for each program
- `bars`: progress bars, and which of them is training's; runs, and the steady step of one
- `trainer_state`: trainer_state.json and printed metrics of Hugging Face's Trainer
- `ddp_logging`: what DDP logs of itself
- `flight_recorder`: dumps of PyTorch's flight recorder
"""
