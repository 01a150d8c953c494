"""What a fit warns of, and samples that cannot be fitted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured.made_measurements import (
    NODE,
    NODES,
    RATES,
    gloo_record,
    gloo_ring,
    jitter,
    made_samples,
)

from calibrate.fit.next_measurement import Target, show_next
from calibrate.fit.profile import fit_all_reduce, fit_logs, fit_profile, samples_of_logs
from calibrate.fit.samples import FitError, Sample
from calibrate.fit.show import data_loaders, residual_table, show, write_residual_figure
from calibrate.records.record import Measurement
from ddpsim.importers.all_reduce import AllReduceLog
from ddpsim.importers.profiles.cluster import GlooRing


def test_one_layout_is_usable_and_says_what_it_does_not_hold() -> None:
    fit = fit_all_reduce(made_samples(NODES, [(2, 4)]), "nccl", gpu="a100-sxm-80gb")
    assert fit.warnings[0] == (
        "one layout was measured (2 x 4): steps inside nodes and between them cannot be told "
        "apart; measure another number of nodes too"
    )
    assert fit.valid.layouts == ((2, 4),)
    assert fit.valid.size_bytes == (1024, 2**27)


def test_times_that_suit_several_networks_ask_for_the_scenarios_word() -> None:
    small = made_samples(NODES, [(2, 4), (4, 4)], [2**k for k in range(10, 16)])
    fit = fit_all_reduce(small, "nccl", gpu="a100-sxm-80gb")
    assert fit.warnings[-1].startswith("the times suit several networks (")
    assert fit.warnings[-1].endswith(
        "): state cluster.inter_node in the scenario, with bandwidth and nics_per_node"
    )


def test_one_line_rate_and_a_reduction_that_never_shows() -> None:
    truth = gloo_ring(reduce=1e12, burst=0.0)
    fit = fit_all_reduce(made_samples(truth, [(2, 1)], rates=[62.5e6], noise=0.005), "gloo")
    assert fit.warnings == (
        (
            "one line rate: what the processor adds to a byte cannot be separated from "
            "what the wire does; measure at another rate before another rate is predicted"
        ),
        "not enough data for reduce rate: adding is always hidden behind the wire",
    )


def test_short_messages_tell_no_line_rate() -> None:
    """Of latency alone: no rate is shown, and the model has none beyond what a host carries."""
    truth = gloo_ring(queue=5e-3, wire=1.0, burst=0.0, line_rate=1e14)
    samples = made_samples(truth, [(1, 2)], [2**k for k in range(12, 17)], noise=0.05)
    fit = fit_all_reduce(samples, "gloo")
    assert fit.warnings[0].startswith("not enough data for the line rate: the messages are too")
    assert isinstance(fit.model, GlooRing)
    assert fit.model.takes_no_limit
    profile = fit_profile([gloo_record()], "short").model_copy(update={"all_reduce": fit.model})
    assert re.search(r"line rate +no limit seen", show(profile))


def test_gloo_at_its_bounds() -> None:
    truth = gloo_ring(queue=0.0, wire=1.0, burst=0.0)
    fit = fit_all_reduce(made_samples(truth, [(2, 1), (3, 1)], rates=RATES), "gloo")
    assert fit.warnings == ("queue is at its bound", "wire bytes per byte is at its bound")


def test_a_layout_with_few_sizes_does_not_count() -> None:
    enough, few = (
        made_samples(NODES, [(2, 4)]),
        made_samples(NODES, [(4, 4)], [1024, 2048, 4096, 8192]),
    )
    fit = fit_all_reduce([*enough, *few], "nccl")
    alone = fit_all_reduce(enough, "nccl")
    assert fit.model == alone.model
    assert fit.warnings[0].startswith("message sizes on 4 x 4 ranks are too few (4): measure 5 ")
    assert fit.warnings[0].endswith("; these do not count")
    assert fit.warnings[1:] == alone.warnings


@pytest.mark.parametrize(
    ("backend", "samples", "message"),
    [
        (
            "nccl",
            [],
            "no all-reduce of two ranks or more was measured: there is nothing to fit",
        ),
        (
            "nccl",
            made_samples(NODES, [(4, 4)], [1024, 2048, 4096, 8192]),
            (
                "message sizes on 4 x 4 ranks are too few (4): measure 5 or more, from a "
                "few kB to the largest bucket"
            ),
        ),
        (
            "gloo",
            made_samples(gloo_ring(), [(2, 1)], [1024, 2048, 4096]),
            "message sizes are too few (3): measure 5 or more, from a few kB to the largest bucket",
        ),
        (
            "gloo",
            made_samples(gloo_ring(), [(2, 1)], rates=[None, 1e9]),
            (
                "the links' line rate is known for some of the measurements only: state it for all "
                "records, or fit them one by one"
            ),
        ),
    ],
)
def test_what_cannot_be_fitted(backend: Any, samples: list[Sample], message: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_all_reduce(samples, backend)
    assert str(raised.value) == message


def test_a_profile_in_words(golden: Callable[[str, Path], None]) -> None:
    records = [gloo_record(rate).with_measurement(jitter(500, 0.02, memory=0.5)) for rate in RATES]
    folder = Path(__file__).parents[2] / "golden"
    profile = fit_profile(records, "testbed", ["a", "b", "c"])
    golden(show(profile) + "\n", folder / "profile-gloo.txt")
    small = tuple(each for each in profile.measured if each.size_bytes < 2**20)
    assert "(RMS of all sizes)" in show(profile.model_copy(update={"measured": small}))
    samples = [
        *made_samples(NODE, [(1, 4)], noise=0.01),
        *made_samples(NODES, [(2, 4), (4, 4)], noise=0.01),
    ]
    layouts = sorted({(s.nodes, s.gpus_per_node) for s in samples})
    logs = [
        AllReduceLog(
            f"{nodes}x{gpus}.txt",
            "nccl-tests log",
            nodes,
            gpus,
            tuple((s.size_bytes, s.time_s) for s in samples if s.nodes == nodes),
        )
        for nodes, gpus in layouts
    ]
    found = fit_logs(logs, "cluster")
    lines = show(found), *show_next(found, Target.of(found, None, None))
    golden("\n".join(lines) + "\n", folder / "profile-nccl.txt")
    assert samples_of_logs(logs) == samples


def test_residuals_as_text_and_as_a_figure(tmp_path: Path) -> None:
    samples = [replace(s, time_s=s.time_s * 1.25) for s in made_samples(NODE, [(1, 4)], [1024])]
    samples += made_samples(gloo_ring(), [(2, 1)], [2**20], [62.5e6])
    *table, what = residual_table(NODE, samples[:1]).splitlines()
    assert what.startswith("measured: the mean of the middle four fifths")
    assert table == [
        "    ranks   line rate      size  measured predicted   error",
        "    1 x 4              1.00 KiB   18.9 us   15.2 us  -20.0 %",
        "1 samples: median error 20.0 %, nine in ten within 20.0 %, largest 20.0 %",
    ]
    assert "62.5 MB/s" in residual_table(gloo_ring(), samples[1:])
    path = tmp_path / "residuals.html"
    write_residual_figure(gloo_ring(), samples[1:], path)
    text = path.read_text(encoding="utf-8")
    assert "2 x 1 ranks" in text
    data = text.split('id="data">')[1].split("</script>")[0]
    assert set(re.findall(r'"marker":\{"color":"(--\w+)"\}', data)) == {"--backward"}
    assert "<script src=" not in text  # it needs no network


def test_a_data_loader_is_told_where_it_is_wanted() -> None:
    loader = Measurement(kind="data_loader", variant="mine:batches", samples_s=(0.01, 0.01, 0.02))
    (line,) = data_loaders([gloo_record().with_measurement(loader)])
    assert line == (
        "data loader mine:batches: a batch in 10.0 ms (median); its samples over that are "
        "workload.data.rate"
    )
