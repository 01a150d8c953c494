"""What training programs and torch itself say of a job: step lines, states, dumps.

- `step_lines`: lines that programs print a step or a bar, with a time in them
- `trainer_state`: trainer_state.json of Hugging Face's Trainer
- `ddp_logging`: what DDP logs of itself
- `flight_recorder`: dumps of PyTorch's flight recorder
"""
