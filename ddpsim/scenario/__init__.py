"""What was asked: the scenario format `ddpsim/1`, its units, and its errors.

- `schema`: the whole scenario; `workload`, `ddp`, `cluster`, `device`, `links`, `run`: its sections
- `document`, `load`: a YAML file, checked, with the place of each error
- `quantity`, `base`, `suggest`: units, what sections share, did-you-mean
- `catalog`: the names of models, devices and machines; `starters`: what `ddpsim init` prints
"""
