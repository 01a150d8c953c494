"""Steps of 30 models on one device: eager and compiled, under DDP, FSDP and with checkpoints.

    python tools/measure_models.py -o models.jsonl --seconds 540 [--device cpu] [--only mlp,lstm]

Each step is a line of JSON, written when it is measured. Started again with the same file, it goes
on with what is missing. A step that ends the process, or takes too long, is noted and left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from zoo.measured import BATCHES, CASES, SHARDED

from calibrate.measure.model.training import Made
from ddpsim.strategies.fully_shard.blocks import block_names

LONGEST_S = 150  # of one step's measurement, compilation included
_WARM_UP, _BLOCKS, _STEPS = 5, 4, 5  # steps before, and blocks of steps that are timed


class Key(NamedTuple):
    """One line of the file."""

    model: str
    batch: int
    mode: str


def plan(names: Sequence[str]) -> Iterator[Key]:
    """What to measure, the most telling first; compilation takes longest."""
    for name in names:
        for batch in BATCHES[name]:
            yield Key(name, batch, "eager")
    for name in names:
        if name in SHARDED:
            for mode in ("ddp", "fully_shard", "fsdp1", "checkpointing"):
                yield Key(name, BATCHES[name][0], mode)
    for place in (0, 1):
        for name in names:
            yield Key(name, BATCHES[name][place], "compiled")


def _blocks(model: nn.Module) -> list[nn.Module]:
    sizes = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    return [model.get_submodule(name) for name in block_names(sizes)]


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _fully_sharded(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model


def _fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({type(block) for block in _blocks(model)})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


def _checkpointed(model: nn.Module) -> nn.Module:
    blocks = {id(block) for block in _blocks(model)}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)
    return model


def _compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()  # noqa: SLF001 -- it has no public name
    device = next(model.parameters()).device
    backend = "inductor" if device.type == "cuda" else "eager"
    compiled: nn.Module = torch.compile(model, backend=backend, dynamic=False)  # type: ignore[assignment]
    return compiled


_WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "compiled": _compiled,
    "ddp": _ddp,
    "fully_shard": _fully_sharded,
    "fsdp1": _fsdp1,
    "checkpointing": _checkpointed,
}


def measured(key: Key, device: torch.device) -> dict[str, Any]:
    """Seconds of steps under autocast with AdamW, and the peak of memory."""
    torch.manual_seed(0)
    with device:
        made = Made(*getattr(CASES, key.model)(key.batch))
    parameters = sum(one.numel() for one in made.model.parameters())
    made = made._replace(model=_WRAPPED[key.mode](made.model))
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-6)
    on_gpu = device.type == "cuda"

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = made.forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first_s = seconds(1)
    seconds(_WARM_UP)
    times = [seconds(_STEPS) for _ in range(_BLOCKS)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {
        "step_s": median(times),
        "steps_s": times,
        "first_s": first_s,
        "peak_bytes": peak,
        "parameters": parameters,
    }


def tried(key: Key, device: torch.device) -> dict[str, Any]:
    """A measurement, or in words why there is none."""
    try:
        return measured(key, device)
    except Exception as error:  # noqa: BLE001 -- the next model is measured whatever it is
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Lines:
    """The file: a line when a measurement begins, and one when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, key: Key, **found: Any) -> None:
        """Write a line at once."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(key._asdict() | found) + "\n")

    def ended(self) -> set[Key]:
        """What needs no second try."""
        return {key for key, line in self._read() if "began" not in line}

    def open_ones(self) -> list[Key]:
        """What began and did not end."""
        ended = self.ended()
        return [key for key, line in self._read() if "began" in line and key not in ended]

    def _read(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        if not self._path.exists():
            return
        for text in self._path.read_text("utf-8").splitlines():
            line = json.loads(text)
            yield Key(*(line[name] for name in Key._fields)), line


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(path: Path, names: Sequence[str], device: torch.device, ends_at: float) -> None:
    """Measure what the file lacks, until `ends_at` of time.monotonic()."""
    lines = Lines(path)
    done = lines.ended()
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    versions = {"device": name, "torch": torch.__version__}
    with one_rank(device):
        for key in plan(names):
            left = ends_at - time.monotonic()
            if key in done or left < 1:
                continue
            lines.add(key, began=True)
            signal.alarm(min(LONGEST_S, int(left) + 1))
            found = tried(key, device)
            signal.alarm(0)
            lines.add(key, **found, **versions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run workers until nothing is missing or the time is up; 0 if all was tried."""
    parser = argparse.ArgumentParser(description="Measure steps of 30 models on one device.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seconds", type=float, default=540, help="for all (default: 540)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(vars(CASES)), help="models, by commas")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - set(vars(CASES)):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    ends_at = time.monotonic() + options.seconds
    if options.worker:
        work(options.output, names, torch.device(options.device), ends_at)
        return 0
    lines = Lines(options.output)
    while (left := ends_at - time.monotonic()) > 1:
        command = [sys.executable, __file__, "--worker", "-o", str(options.output)]
        command += ["--seconds", str(left), "--device", options.device, "--only", options.only]
        code = subprocess.run(command, check=False).returncode  # noqa: S603 -- our own script
        crashed = lines.open_ones()
        if code == 0 or not crashed:
            break
        if ends_at - time.monotonic() > 1:  # what the end of the time cut off is tried again
            lines.add(crashed[-1], error=f"the process ended with code {code}")
    missing = len(set(plan(names)) - lines.ended())
    print(f"{missing} steps are missing" if missing else "all steps were tried")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
