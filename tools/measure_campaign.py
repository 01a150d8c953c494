"""A campaign on the testbed: records to fit a profile to, and real DDP rounds to hold it against.

Each host has a core of its own, on which it computes, sends and receives, as long as there are
cores enough. What is there already is not measured again, so a campaign can be stopped any time.

    python tools/measure_campaign.py FOLDER --fit-rates 0.5,1,3 --rates 0.2,0.8,2,5
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from calibrate.measure.cluster.plan import Options
from calibrate.records.record import Kind, load_record
from calibrate.records.rounds import RoundOptions, load_rounds
from calibrate.records.variant import CAPS, Variant
from calibrate.testbed.bed import Testbed
from calibrate.testbed.errors import TestbedError
from calibrate.validate.steady_step import bare_compute_s, bare_rounds_s, times_the_least

MODELS = ("transformer", "cnn", "wide_mlp", "embedding", "deep_mlp", "mixer")
_GBIT = 1e9 / 8  # bytes
_LONGEST_S = 1800.0  # of one job, before it is given up
# what a profile needs
_KINDS: tuple[Kind, ...] = (
    "jitter",
    "compute",
    "ddp_hook",
    "device_copy",
    "device_cast",
    "all_reduce",
)
_HOOKS = "hooks"  # which send nothing: one rate is enough
# the same in short for strategies, with what else they send: a record each, and its share of time
_PARTS: dict[str, tuple[tuple[Kind, ...], float]] = {
    "network": (("jitter", "all_reduce", "device_copy"), 0.4),
    _HOOKS: (("ddp_hook", "narrow_products"), 0.24),
    "beside": (("compute",), 0.3),
    "collectives": (("broadcast", "reduce_scatter", "all_gather"), 0.18),
}
_OTHERS = (Variant(accumulation_steps=2), Variant(comm_hook="fp16_compress"))
_ONE_BUCKET_MIB = 1000.0  # of these models
_SHARDED = (
    Variant(strategy="zero1"),
    Variant(strategy="fully_shard"),
    Variant(strategy="fully_shard", reshard_after_forward=False),
)
_STRATEGIES = (
    Variant(),
    Variant(strategy="naive"),
    Variant(strategy="naive_flat"),
    Variant(strategy="per_parameter"),
    Variant(accumulation_steps=2),
    Variant(accumulation_steps=2, no_sync=False),
    Variant(comm_hook="powerSGD", bucket_cap_mb=_ONE_BUCKET_MIB),
    Variant(comm_hook="powerSGD", bucket_cap_mb=_ONE_BUCKET_MIB, matrix_approximation_rank=2),
    Variant(find_unused_parameters=True),
    Variant(gradient_as_bucket_view=True),
    *_SHARDED,
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Campaign:
    """What to measure, into `folder`; rates in Gbit/s, budgets in seconds.

    `record_only` names the kinds of a record, for a file of its own beside the usual one; `others`
    adds accumulation and a compressing hook to the bucket caps; `strategies` measures every
    strategy and option in place of caps, `sharded` DDP and the sharded ones alone, and records in
    parts what they need. Rounds are measured
    `runs` times, in processes of their own, and all else between: what one run's medians say of
    another's.
    """

    folder: Path
    fit_rates: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    models: tuple[str, ...] = MODELS
    caps: tuple[float | None, ...] = CAPS
    hosts: int = 2
    rounds: tuple[int, int] = (6, 15)
    runs: int = 1
    budget_s: float = 100.0
    record_budget_s: float = 240.0
    record_only: tuple[Kind, ...] = ()
    others: bool = False
    strategies: bool = False
    sharded: bool = False
    again_above: float | None = None

    def run(self, say: Say) -> int:
        """Measure what is missing; returns how many measurements failed, each said with why.

        What was measured while the machine was more than `again_above` times slower than in the
        fastest file of its kind is measured once more, and the calmer of the two kept.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        jobs = list(self._jobs())
        failed = sum(not job.run(self.folder, self.hosts, say) for job in jobs)
        if self.again_above:
            slower = self._slowness()
            for job in jobs:
                times = slower.get(self.folder / job.name, 1.0)
                if times > self.again_above:
                    say(f"slower    {job.name}: its bare compute took {times:.2f} times the least")
                    self._again(job, say)
        return failed

    def _again(self, job: _Job, say: Say) -> None:
        path = self.folder / job.name
        first = path.with_suffix(".first.json")
        path.rename(first)
        try:
            measured = job.run(self.folder, self.hosts, say)
        except BaseException:
            first.replace(path)
            raise
        slower = self._slowness()
        if measured and slower.get(path, math.inf) < slower[first]:
            first.unlink()
        else:
            first.replace(path)

    def _slowness(self) -> dict[Path, float]:
        """The slowness of all records and rounds of the folder, which may hold more."""
        return slowness([*self.folder.glob("record*.json"), *self.folder.glob("rounds-*.json")])

    def _jobs(self) -> Iterator[_Job]:
        for rate in self.fit_rates:
            only, budget_s = self.record_only, self.record_budget_s
            if not (self.strategies or self.sharded):
                yield self._recording(only, rate, only or _KINDS, budget_s)
                continue
            for part, (kinds, share) in _PARTS.items():
                if part == _HOOKS and rate != self.fit_rates[0]:
                    continue
                yield self._recording((part,), rate, kinds, share * budget_s)
        for run, rate, model in product(range(1, self.runs + 1), self.rates, self.models):
            name = f"rounds-{model.rpartition(':')[2]}-{rate:g}gbit-{self.hosts}hosts"
            name += f".run{run}.json" if run > 1 else ".json"
            options = partial(self._rounds, model)
            yield _Job(name, rate, "calibrate.measure.ddp.rounds", options)

    def _recording(
        self, words: tuple[str, ...], rate: float, kinds: tuple[Kind, ...], budget_s: float
    ) -> _Job:
        """A record of these kinds; `words` tell its file from others."""

        def options(output: Path, rate: float) -> str:
            return Options(
                output=output,
                time_budget_s=budget_s,
                only=kinds,
                line_rate_bytes_per_s=rate * _GBIT,
                comm_first=True,
            ).model_dump_json()

        name = "-".join(("record", *words, f"{rate:g}gbit-{self.hosts}hosts.json"))
        return _Job(name, rate, "calibrate.measure.cluster.session", options)

    def _rounds(self, model: str, output: Path, rate: float) -> str:
        """Options of `calibrate.measure.ddp.rounds` as JSON."""
        return RoundOptions(
            output=output,
            model=model if ":" in model else f"testbed_models:{model}",
            variants=self._variants(),
            rounds=self.rounds,
            budget_s=self.budget_s,
            line_rate_bytes_per_s=rate * _GBIT,
            comm_first=True,
        ).model_dump_json()

    def _variants(self) -> tuple[Variant, ...]:
        if self.strategies or self.sharded:
            return _STRATEGIES if self.strategies else (Variant(), *_SHARDED)
        caps = tuple(Variant(bucket_cap_mb=cap) for cap in self.caps)
        return caps + (_OTHERS if self.others else ())


@dataclass(frozen=True)
class _Job:
    """One file to measure: a module to run on every host, with options for an output and a rate."""

    name: str
    rate: float
    module: str
    options: Callable[[Path, float], str]

    def run(self, folder: Path, hosts: int, say: Say) -> bool:
        """Measure it unless it is there; the file appears when it is whole."""
        path, part = (folder / self.name).resolve(), (folder / f".{self.name}.part").resolve()
        if path.exists():
            say(f"there     {path.name}")
            return True
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, self.options(part, self.rate)]
        began = time.monotonic()
        try:
            with Testbed([self.rate * _GBIT] * hosts, cores=_cores(hosts)) as testbed:
                testbed.run([command] * hosts, _variables(), _LONGEST_S)
        except TestbedError as error:
            say(f"FAILED    {path.name}: {error}")
            return False
        part.rename(path)
        say(f"measured  {path.name} in {time.monotonic() - began:.0f} s")
        return True


def slowness(files: Iterable[Path]) -> dict[Path, float]:
    """How many times as long each file's bare compute took as in the fastest of these files.

    Of records (`record*.json`) the pieces of compute, of rounds the model without DDP and a
    record's layer, each against its like; the most of it. A file that holds no bare compute is
    left out.
    """
    return times_the_least({file: _bare_s(file) for file in files})


def _bare_s(file: Path) -> dict[str, float]:
    if file.name.startswith("record"):
        return bare_compute_s(load_record(file))
    return bare_rounds_s(load_rounds(file))


def _cores(hosts: int) -> list[set[int]]:
    """One core a host, by turns where there are fewer cores than hosts."""
    usable = sorted(os.sched_getaffinity(0))
    return [{usable[host % len(usable)]} for host in range(hosts)]


def _variables() -> dict[str, str]:
    """What a host needs beside the testbed's own: this very code."""
    places = dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)])
    return {"PYTHONPATH": os.pathsep.join(places)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="where the JSON files go")
    add("--fit-rates", type=_numbers, default=(), help="Gbit/s, of records")
    add("--rates", type=_numbers, default=(), help="Gbit/s, of DDP rounds")
    add("--models", type=_names, default=MODELS, help="or MODULE:FUNCTION")
    add("--hosts", type=int, default=2)
    add("--rounds", type=int, nargs=2, default=(6, 15), metavar=("LEAST", "MOST"))
    add("--budget", dest="budget_s", type=float, default=100.0, help="seconds, a run of rounds")
    add("--runs", type=int, default=1, help="of each model at each rate, all else between")
    add(
        "--record-budget",
        dest="record_budget_s",
        type=float,
        default=240.0,
        help="seconds, a record",
    )
    add("--only", dest="record_only", type=_names, default=(), help="kinds that a record holds")
    add("--others", action="store_true", help="accumulation and a hook too")
    add("--strategies", action="store_true", help="every strategy and option, in place of caps")
    add("--sharded", action="store_true", help="DDP and the sharded strategies, in place of caps")
    add(
        "--again-above",
        type=float,
        metavar="TIMES",
        help="measure once more what ran while the machine was so many times slower, and keep the "
        "calmer",
    )
    campaign = Campaign(**vars(parser.parse_args(arguments)))
    failed = campaign.run(lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True))
    return 1 if failed else 0


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
