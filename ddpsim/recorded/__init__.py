"""Jobs that were recorded: traced steps simulated again, and scenarios from what files say.

- `traced_job`: the scenario that traces tell, and what it assumes
- `replay`: the traced steps simulated, each rank with its own work; NCCL's choices in them
- `recognise`, `learned`: what a file is, what it says, and a scenario to start from
"""
