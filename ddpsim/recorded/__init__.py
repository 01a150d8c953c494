"""Jobs that were recorded: traced steps simulated again, and scenarios from what files say.

- `traced_job`: the scenario that traces tell, and what it assumes
- `replay`: the traced steps simulated, each rank with its own work
- `kernels`: NCCL's choices in the traces beside the tuner's
- `scenario_file`: a scenario written so that its files are found from its folder
"""
