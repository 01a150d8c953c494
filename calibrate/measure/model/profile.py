"""`profile`: a model's times on one device with no communication, as part of its file.

Several ranks tell one thing more: how it fares beside all-reduces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from pydantic import Field

from calibrate.capture.capture import render
from calibrate.files import FileName, check_writable, rescued
from calibrate.measure.cluster.interference import BesideAllReduces
from calibrate.measure.errors import MeasureError, StoppedError
from calibrate.measure.host.machine import keep_freed_memory
from calibrate.measure.model.document import (
    Document,
    check_scaled_from,
    device_name,
    measured_part,
    model_document,
    peak_memory,
    scale_profile,
    title_of,
    with_other_part,
)
from calibrate.measure.model.samples import (
    WARMUPS,
    HookTimes,
    Samples,
    check_the_same_take_part,
    hook_cost_s,
    later_ratios,
    measure_iterations,
    step_s,
    under_ddp,
)
from calibrate.measure.model.training import (
    Training,
    batch_of,
    compute_threads,
    not_modelled,
    prepare,
    sizes_of,
    told_of_unused,
)
from calibrate.measure.model.user_code import told_of_code
from calibrate.measure.ranks.job import Job, process_group, taking_part
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.rounds import ModelOptions
from calibrate.validate.interference_exponent import profile_keys
from ddpsim.files import write_atomically
from ddpsim.importers.profiles.model import profile_of
from ddpsim.wording import counted

_STEPS_A_PAIR = 3  # iterations for every step of two micro-batches
_LOGGED = 10  # DDP's first iterations wait for its log's events on a GPU (torch: logger.cpp)
_LENGTHENED = 9  # rounds in which queues of all-reduces grow to last as long as a backward
_FEWEST_ROUNDS = 6
_NO_EXPONENT = (
    "how much the model suffers beside all-reduces is not in this profile (interference_exponent), "
    "so usual layers stand for it: "
)


class ProfileOptions(ModelOptions):
    """What to profile, on one device or by the ranks of a job together."""

    output: FileName = Field(description="the profile, which the first rank writes")
    iterations: int = Field(30, ge=1)
    device: str = Field("auto", description="auto, cpu or cuda:N; ranks have their own")
    threads: int = Field(1, ge=1, description="of one CPU")
    scale: tuple[str, str] | None = Field(None, description="from one device preset to another")

    @property
    def kept(self) -> str:
        """What of the profile is in its file."""
        return f"All but how it fares beside all-reduces is in {self.output}, if it is there yet."


def profile(
    options: ProfileOptions, job: Job | None = None, keep: Callable[[Document], None] | None = None
) -> Document:
    """Measure the model that MODULE:FUNCTION makes, and return its profile, ready for JSON.

    Iterations with gradient hooks and without take turns: times of the parts come from those
    without; a ready time is a fraction of its own backward, less the hooks' cost, which is measured
    on a model of tiny parameters. Then steps of two micro-batches tell what the second one takes,
    and steps under DDP of one rank what DDP's own work takes; `warnings` says why where it cannot
    be measured. All ranks of a `job` measure at once, each on its own device, and then, once `keep`
    has what is known until then, how the backward fares beside their all-reduces.
    Raises MeasureError where the function or what it returns cannot be used.
    """
    reference, iterations = options.model, options.iterations
    where = job.device if job else device_of(options.device)
    threads = options.threads
    if threads > (cores := os.cpu_count() or threads):
        raise MeasureError(f"--threads {threads}: this machine has {counted(cores, 'core')}")
    with compute_threads(threads):
        size = batch_of(reference, options.batch)
        try:
            training = prepare(reference, size, where, options.optimizer, fused=options.fused)
            samples = measure_iterations(training, iterations)
        except torch.cuda.OutOfMemoryError:
            raise MeasureError(
                f"batch {size} of {reference} does not fit into the memory of {where}: "
                "give a smaller --batch"
            ) from None
        except Exception as error:
            if told := told_of_code(error):
                raise told from error
            raise
        check_the_same_take_part(training, samples)
        memory = peak_memory(training, where)  # of usual steps: two micro-batches may take more
        samples.later = later_ratios(training, max(1, iterations // _STEPS_A_PAIR))
        warnings = [*not_modelled(training.model), *_try_ddp(training, samples, iterations)]
        title = title_of(reference, size, where, threads)
        measured_with = {"device": device_name(where), "optimizer": options.optimizer}
        hook_s = hook_cost_s(where, samples)
        measured = measured_part(training, samples, size, title, hook_s) | memory | measured_with
        measured |= sizes_of(reference) | {"warnings": warnings}
        document = model_document(reference, training, samples) | {"measured": measured}
        if job is None or keep is None:
            return document
        keep(document)
        exponent, missing = _exponent(training, job, iterations)
        warnings += [_NO_EXPONENT + missing] if missing else []
        return document | {"measured": measured | exponent}


def profile_alone(options: ProfileOptions) -> Document:
    """Profile on one device and write the file; raises MeasureError as `profile` does."""
    try:
        keep_freed_memory()  # as a job's ranks do
        return _written(options, None)
    except KeyboardInterrupt:
        raise StoppedError("stopped. Nothing was kept") from None


def profile_in_job(options: ProfileOptions) -> Document:
    """Profile in the job of torchrun's variables: every rank calls this, rank 0 writes the file.

    Raises MeasureError as `profile` does, and where a peer is lost.
    """
    with taking_part(options) as job:
        return _written(options, job)


def _written(options: ProfileOptions, job: Job | None) -> Document:
    """Profile and write; what would be refused after the work is refused before it."""

    def scaled(document: Document) -> Document:
        return scale_profile(document, *options.scale) if options.scale else document

    def keep(document: Document) -> None:
        _first_does(job, lambda: write_profile(scaled(document), options.output))

    _first_does(job, lambda: check_writable(options.output))
    if options.scale:
        device = job.device if job else device_of(options.device)
        check_scaled_from(device_name(device), options.scale[0])
    document = profile(options, job, keep)
    keep(document)
    return scaled(document)


def _first_does(job: Job | None, work: Callable[[], None]) -> None:
    job.first_does(work) if job else work()


def write_profile(document: Document, path: Path) -> None:
    """Write a profile whole that `run` reads, or leave the old one as it was.

    What was captured of the model stays in the file. Raises MeasureError where it cannot be
    written, ImportFailedError where it could not be read.
    """
    text = render(document) + "\n"
    profile_of(str(path), text)
    try:
        write_atomically(path, render(with_other_part(document, path)) + "\n")
    except (OSError, MeasureError) as error:
        wrong = (
            f"{path} cannot be written: {error.strerror}" if isinstance(error, OSError) else error
        )
        raise MeasureError(f"{wrong}. {rescued('model.json', text)}") from None


def device_of(name: str) -> torch.device:
    """The device of auto, cpu or cuda:N; raises MeasureError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MeasureError(f"{name!r} is no device: wanted auto, cpu or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeasureError(f"{name}: this torch ({torch.__version__}) sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise MeasureError(f"{name!r} is not measured here: wanted auto, cpu or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise MeasureError(f"{name}: this machine has {count} CUDA devices, counted from 0")
        torch.cuda.set_device(device)  # events are recorded on the current one
    return device


def _try_ddp(training: Training, samples: Samples, steps: int) -> list[str]:
    """Measure steps under DDP; or say why there are none, which is no reason to lose the rest."""
    missing = "DDP's own work is not in this profile (with_ddp_s, ddp_hook_s)"
    if training.unused:
        idle = f"{told_of_unused(training)} got no gradient"
        return [f"{missing}: {idle}, which DDP takes with find_unused_parameters=True alone"]
    try:
        _measure_ddp(training, samples, steps)
    except Exception as error:  # noqa: BLE001 -- the user's function, DDP, or memory: all are told
        return [f"{missing}: {told_of_code(error) or error}"]
    finally:
        training.optimizer.zero_grad()
    return []


def _measure_ddp(training: Training, samples: Samples, steps: int) -> None:
    """Steps under DDP of this process alone over bare ones; on a CPU its hooks too."""
    is_gpu = next(training.model.parameters()).is_cuda
    unsettled = WARMUPS + (_LOGGED if is_gpu else 0)
    with process_group("nccl" if is_gpu else "gloo"):
        wrapped = under_ddp(training)
        ratios = [step_s(wrapped) / step_s(training) for _ in range(unsettled + steps)]
        hooks_s = {} if is_gpu else _ddp_hooks_s(training, steps)
    samples.with_ddp, samples.ddp_hook_s = ratios[unsettled:], hooks_s


def _ddp_hooks_s(training: Training, steps: int) -> Mapping[str, float]:
    hooks = HookTimes(training)
    for i in range(WARMUPS + steps):
        hooks.step(warm=i < WARMUPS)
    return hooks.medians_s()


def _exponent(training: Training, job: Job, iterations: int) -> tuple[Document, str]:
    """Of interference, from all ranks; or why it is not known, with what to do."""
    beside, lacking = _try_beside(training, job)
    if beside is None:
        return {}, lacking
    for i in range(_LENGTHENED + max(_FEWEST_ROUNDS, iterations)):
        beside.step(warm=i < _LENGTHENED)
    measured = beside.measured()
    if measured is None:
        outlasts = "its backward outlasts the longest queue of them; give a smaller --batch"
        return {}, outlasts if job.world_size > 1 else ""  # one rank has nobody to reduce with
    known = profile_keys([measured])
    unknown = "it is not known to 0.1; give more --iterations, or ranks cores of their own"
    return known, "" if known else unknown


def _try_beside(training: Training, job: Job) -> tuple[BesideAllReduces | None, str]:
    """Ready to step, where all ranks have the memory; otherwise what the first lacks."""
    beside, lacking = None, ""
    try:
        if job.device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL takes memory of its own, from what torch does not hold
        beside = BesideAllReduces(training, job)
        training.forward().backward()  # type: ignore[no-untyped-call]
    except torch.cuda.OutOfMemoryError:
        lacking = f"rank {job.rank} has no memory for it; give a smaller --batch"
    training.optimizer.zero_grad()
    first = next(filter(None, job.everyone(lacking)), "")
    return (None if first else beside), first


if __name__ == "__main__":
    run_rank(profile_in_job, ProfileOptions)
