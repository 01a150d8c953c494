"""Measure a cluster and a model: the one package that imports torch.

`session.measure` runs in a torch.distributed job and `launch.local` starts one on this machine;
both keep a record. `profile.profile` times a model, `doctor.doctor` looks before one measures.
"""
