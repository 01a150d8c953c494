"""A real, bandwidth-limited network on one Linux machine: hosts to gloo, DDP and any TCP program.

    from calibrate.testbed.bed import Testbed

    with Testbed([125e6, 125e6, 25e6]) as testbed:  # bytes/s of each host's link
        testbed.run([["python", "train.py"]] * 3)

Modules: `shaping` (rates to token buckets), `state` (what was made, on file), `network` (made and
removed), `processes` (a command on every host), `bed` (the context), `cli`.
"""
