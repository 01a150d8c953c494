"""Jobs with the fault of an old version of torch or DeepSpeed."""

from __future__ import annotations

from jobs.faulty_job import Job

OLD_VERSIONS = (
    Job(
        "tied weights under torch 1.7",
        "shared_weights",
        {"model": "gpt2", "batch_per_rank": 4, "seq_len": 128, "step_time": "49 ms"},
        {
            "device": "rtx-3090",
            "nodes": 1,
            "gpus_per_node": 2,
            "intra_node": {"bandwidth": "6.5 GB/s", "latency": "8 us"},
        },
        ("ddp.torch='1.7'",),
        measured=("exposed", "all_reduce"),
        ddp={"find_unused_parameters": True},
    ),
    Job(
        "DeepSpeed 0.18.5",
        "counting_hooks",
        {"model": "gpt2-large", "batch_per_rank": 4, "step_time": "300 ms"},
        {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 8},
        ("ddp.deepspeed={version: 0.18.5}",),
        measured=("all_reduce",),
        ddp={"strategy": "deepspeed"},
    ),
)
