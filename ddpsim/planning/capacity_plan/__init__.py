"""How many GPUs reach a target, in what time and for what price."""
