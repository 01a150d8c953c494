"""Logs of training in the forms that programs print. SYNTHETIC: nobody measured the figures."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["LOGS", "bar", "bars"]


def bar(label: str, step: int, total: int | None, step_s: float, rest: str = "") -> str:
    """A state of tqdm's bar, as format_meter prints it."""
    at = int(step * step_s)
    clock = f"{at // 60:02}:{at % 60:02}"
    if at >= 3600:
        clock = f"{at // 3600}:{at // 60 % 60:02}:{at % 60:02}"
    rate = f"{step_s:5.2f}s/it" if step_s > 1 else f"{1 / step_s:5.2f}it/s"
    name = f"{label}: " if label else ""
    if total is None:
        return f"{name}{step}it [{clock}, {rate}{rest}]"
    return f"{name}{100 * step // total:3}%|███▎   | {step}/{total} [{clock}<29:20, {rate}{rest}]"


def bars(label: str, steps: Iterable[int], total: int | None, step_s: float) -> list[str]:
    """States of one bar."""
    return [bar(label, step, total, step_s) for step in steps]


_MEGATRON = "".join(
    f" [2026-03-14 09:00:{i}] iteration {i:8}/     100 | consumed samples: {256 * i:12} | elapsed "
    f"time per iteration (ms): {ms} | learning rate: 1.0E-04 | global batch size:   256 |\n"
    "time (ms) | forward-compute: 140.2 | backward-compute: 240.9 | "
    "backward-params-all-reduce: 41.5 | optimizer: 11.4\n"
    for i, ms in ((10, 5012.4), (20, 430.1), (30, 431.3), (40, 430.7))
)
_DEEPSPEED = "".join(
    f"[2026-03-14 09:00:{i},000] [INFO] [timer.py:200:stop] epoch=0/micro_step={8 * i}/global_step="
    f"{i}, RunningAvgSamplesPerSec=101.2, CurrSamplesPerSec=102.0, MemAllocated=10.1GB\n"
    f"[2026-03-14 09:00:{i},001] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | "
    "fwd_microstep: 20.5 | bwd_microstep: 40.2 | step_microstep: 10.1\n"
    f"[2026-03-14 09:00:{i},001] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: {fwd} | "
    "bwd: 330.0 | bwd_inner: 290.0 | bwd_allreduce: 40.5 | step: 10.00\n"
    for i, fwd in ((10, 160.1), (20, 159.9), (30, 160.0))
)
_TRAINER = """{'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 4.5e-05, 'epoch': 0.1}
{'eval_loss': 2.0, 'eval_runtime': 6.0, 'eval_steps_per_second': 10.0, 'epoch': 0.2}
{'train_runtime': 600.0, 'train_steps_per_second': 1.25, 'train_loss': 2.05}
"""
_SWIFT = "".join(
    f"{{'loss': 1.{i}, 'memory(GiB)': 15.2, 'train_speed(iter/s)': {rate}, 'epoch': 0.01, "
    f"'global_step/max_steps': '{i}/1000', 'percentage': '0.5%', 'elapsed_time': '40s'}}\n"
    for i, rate in ((5, 0.2), (10, 0.401), (15, 0.4), (20, 0.4))
)
_PROFILER = """FIT Profiler Report
|  Action                                       |  Mean duration (s) |  Num calls | Total time (s) |
|  Total                                        |  -                 |  9000      |  250.0         |
|  run_training_epoch                           |  240.0             |  1         |  240.0         |
|  run_training_batch                           |  0.25              |  800       |  200.0         |
|  [LightningModule]Net.optimizer_step          |  0.20              |  200       |  40.0          |
|  [_TrainingEpochLoop].train_dataloader_next   |  0.01              |  800       |  8.0           |
|  [Strategy]DDPStrategy.validation_step        |  0.05              |  100       |  5.0           |
"""

# by program: the log, the step in seconds, and what a reader must be told
LOGS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "tqdm": (
        "\r".join(
            [
                *bars("Training", (1, 2), 300, 9.0),
                *bars("Training", (100, 200, 250, 300), 300, 1.5),
                *bars("Evaluating", (50, 100, 200), 200, 0.05),
            ]
        )
        + "\n",
        1.5,
        ("left out: bars 'Evaluating' of 200 (50.0 ms each)",),
    ),
    "detectron2": (
        "".join(
            f"[03/14 09:00:{i} d2.utils.events]:  eta: 2:00:00  iter: {19 + 20 * i}  "
            f"total_loss: 0.8  time: {s}  last_time: 0.3  data_time: 0.0{i}  lr: 0.02  mem: 5120M\n"
            f"[03/14 09:00:{i} d2.evaluation.evaluator]: Inference done 11/100. Dataloading: 0.001 "
            "s/iter. Inference: 0.0512 s/iter. Total: 0.0531 s/iter. ETA=0:01:00\n"
            for i, s in ((30, "0.3100"), (31, "0.3110"), (32, "0.3090"))
        ),
        0.31,
        ("of which 31.0 ms wait for data", "left out: 3 lines of evaluation"),
    ),
    "mmengine": (
        "".join(
            f"2026/03/14 09:00:10 - mmengine - INFO - Epoch({kind})  [{epoch}][{i:3}/1000]  "
            f"lr: 1.0e-02  eta: 1:10:00  time: {s}  data_time: 0.0110  memory: 6120  loss: 1.20\n"
            for epoch, i, kind, s in (
                *((1, 50, "train", "0.4520"), (1, 100, "val", "0.0900")),
                *((2, 50, "train", "0.4515"), (2, 100, "val", "0.0900")),
            )
        ),
        0.45175,
        ("of which 11.0 ms wait for data", "left out: 2 lines of evaluation"),
    ),
    "PyTorch's ImageNet example": (
        "".join(
            f"Epoch: [0][{i:4}/5005]\tTime {s:6.3f} ( 0.912)\tData {d:6.3f} ( 0.466)\t"
            "Loss 7.0e+00 (7.1e+00)\tAcc@1   0.00 (  0.10)\tAcc@5   0.39 (  0.52)\n"
            for i, s, d in (
                (1, 5.2, 3.0),
                (11, 0.211, 0.003),
                (21, 0.212, 0.003),
                (31, 0.212, 0.003),
            )
        )
        + "Test: [  1/196]\tTime  0.813 ( 0.813)\tLoss 6.9e+00 (6.9e+00)\n",
        0.212,
        ("of which 3.00 ms wait for data", "left out: 1 line of evaluation"),
    ),
    "Megatron": (_MEGATRON, 0.431, ("the gradients' all-reduce takes 41.5 ms",)),
    "DeepSpeed": (
        _DEEPSPEED,
        0.5,
        (
            "the optimizer takes 10.0 ms more",
            "8 micro-batches a step, which takes 500 ms",
            "the gradients' all-reduce takes 40.5 ms",
        ),
    ),
    "transformers' Trainer": (
        _TRAINER,
        0.8,
        ("evaluation took 6.00 s of 600 s: without it a step takes 792 ms",),
    ),
    "ms-swift": (_SWIFT, 2.5, ()),
    "litgpt": (
        "".join(
            f"Epoch 1 | iter {4 * i} step {i} | loss train: 8.1, val: n/a | iter time: {ms:.2f} ms "
            "(step) remaining time: 1:10:00\n"
            for i, ms in ((4, 150.1), (5, 149.9), (6, 150.0))
        )
        + "iter 24: val loss 2.0123, val time: 5000.12 ms\n",
        0.6,
        ("4 micro-batches a step, which takes 600 ms", "left out: 1 line of evaluation"),
    ),
    "Lightning's profiler": (
        _PROFILER,
        1.04,
        ("of which 10.0 ms wait for data", "4 micro-batches a step, which takes 1.04 s"),
    ),
    "nanoGPT": (
        "step 0: train loss 4.2, val loss 4.1\n"
        + "".join(
            f"iter {i}: loss 3.{i:04}, time {ms:.2f}ms, mfu 17.50%\n"
            for i, ms in enumerate((900.0, 250.0, 245.0, 246.0, 245.5))
        ),
        0.2455,
        (),
    ),
    "torchtitan": (
        "".join(
            f"[titan] 2025-02-01 10:00:{10 * i:02},500 - root - INFO - "
            f"\x1b[31mstep: {10 * i + 1:2}  \x1b[32mloss:  7.1234  \x1b[34mtps: 5,820\x1b[39m\n"
            for i in range(5)
        ),
        1.0,
        (),
    ),
}
