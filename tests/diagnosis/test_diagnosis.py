"""What a diagnosis says of itself, and the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from typing import Any

import numpy as np
import pytest
from jobs.faulty_jobs import BERT, IB_NODES, ONE_NODE, RESNET, TCP_NODES, Job
from shipped_scenarios import ROOT, load, predict

import ddpsim
from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.diagnose import diagnose
from ddpsim.diagnosis.hypotheses import HYPOTHESES, hypotheses_of
from ddpsim.diagnosis.predictions import Seen, fit, log_likelihood, posterior
from ddpsim.errors import InputError
from ddpsim.prediction.resolve import resolve
from ddpsim.report.diagnosis import render_diagnosis
from ddpsim.result.model import interval_in_words


def scenario(cluster: dict[str, Any], **workload: Any) -> ddpsim.Scenario:
    return Job("a job", "healthy", {**RESNET, **workload}, cluster).scenario()


@pytest.fixture(scope="module")
def slow() -> ddpsim.Diagnosis:
    return ddpsim.diagnose(scenario(ONE_NODE), "150 ms", without_sync="75 ms")


def test_one_gpu_keeps_no_copy_among_others() -> None:
    settings = ("ddp.strategy=fully_shard", "ddp.fully_shard.reshard_after_forward=8")
    case = Case.of(load("gpt2-xl-hsdp", *settings))
    assert case.on(1, 1).scenario.ddp.sharding.reshard_after_forward is None
    assert case.on(2, 8).scenario.ddp.sharding.reshard_after_forward == 8


def test_probabilities_are_of_all_causes(slow: ddpsim.Diagnosis) -> None:
    for of in ("prior", "probability"):
        assert sum(getattr(cause, of) for cause in slow.causes) == pytest.approx(1)
    assert not slow.is_healthy
    assert slow.normal is False


def test_causes_with_another_step_come_last(slow: ddpsim.Diagnosis) -> None:
    """Causes whose step is near the measured one by probability, and then the others by it."""
    measured_s = slow.measured[0].measurement.seconds
    near = [
        each.predicts is None or abs(log(each.predicts.step_s / measured_s)) < log(1.5)
        for each in slow.causes
        if each.key not in ("healthy", "unknown") and each.predicts
    ]
    assert near == sorted(near, reverse=True)
    first = [cause.probability for cause in slow.causes if cause.predicts][: sum(near)]
    assert first == sorted(first, reverse=True)


def test_a_healthy_job_just_outside_the_interval_is_not_called_abnormal() -> None:
    """One in five is: the verdict does not contradict the likeliest cause."""
    interval = predict("bert-large-4x8-ib").prediction_interval_s
    assert interval
    found = ddpsim.diagnose(load("bert-large-4x8-ib"), 1.01 * interval.high)
    assert (found.normal, found.is_healthy) == (False, True)
    text = render_diagnosis(found, "job.yaml")
    assert "\nverdict     outside the 80% interval" in text
    assert "as one healthy job in five is" in " ".join(text.split())


def test_run_and_diagnose_say_the_same_verdict() -> None:
    job = load("bert-large-4x8-ib")
    interval = predict("bert-large-4x8-ib").prediction_interval_s
    assert interval
    for measured_s in (interval.low, 1.01 * interval.high, 3 * interval.high, 0.4 * interval.low):
        found = ddpsim.diagnose(job, measured_s)
        line = render_diagnosis(found, "job.yaml").split("\nverdict")[1].split("\nlikely")[0]
        said = ddpsim.judge(job, ddpsim.simulate(job), measured_s).text
        words = " ".join(line.replace(interval_in_words(interval), "80% interval").split())
        assert said.endswith(words.replace(": ", ", "))


def test_steps_that_grow_as_no_healthy_job_does_are_not_normal() -> None:
    """Though the last alone is inside the interval; growth within the noise is normal."""
    job = load("bert-large-4x8-ib")
    interval = predict("bert-large-4x8-ib").prediction_interval_s
    assert interval
    last_s = 0.99 * interval.high
    grown = ddpsim.diagnose(job, f"2x8: {last_s / 1.4!r} s, 4x8: {last_s!r} s")
    assert not grown.is_healthy
    assert grown.normal is False
    assert grown.misfit is grown.measured[0]
    text = " ".join(render_diagnosis(grown, "job.yaml").split())
    assert "verdict not normal: 1.40 times the step on 2 x 8, predicted 1.0" in text
    assert "alone it is inside the 80% interval" in text
    first, second = (each.predicted_s for each in grown.measured)
    healthy = ddpsim.diagnose(job, f"2x8: {first!r} s, 4x8: {second!r} s")
    assert (healthy.normal, healthy.misfit) == (True, None)


def test_a_step_that_is_too_fast_is_called_so() -> None:
    """What it would take of the device's peak, and what to check; health has no remedy."""
    job = load("bert-large-4x8-ib")
    result = predict("bert-large-4x8-ib")
    assert result.training
    assert result.training.mfu
    share = result.training.mfu / 1.2  # a step of 120 % of the peak
    found = ddpsim.diagnose(job, share * result.iteration_time_s.mean)
    assert found.mfu == pytest.approx(1.2)
    text = " ".join(render_diagnosis(found, "job.yaml").split())
    assert "not normal: faster than the 80% interval" in text
    assert "with an MFU of 120%, more than the device can do; check the unit" in text
    healthy = next(cause for cause in found.causes if cause.key == "healthy")
    assert healthy.mended_s is None
    assert healthy.text.startswith("nothing is wrong: the prediction is off")
    assert "explain-step" not in text


def test_no_peak_is_named_that_convolutions_exceed() -> None:
    """ResNet-50 in fp32: its convolutions run in TF32, at eight times the rate of its MFU."""
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 8}
    workload = {"model": "resnet50", "batch_per_rank": 64}
    document = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    job = ddpsim.load_scenario(document)
    result = ddpsim.simulate(job)
    assert result.training
    assert result.training.mfu
    text = ddpsim.judge(job, result, result.iteration_time_s.mean * result.training.mfu / 3).text
    assert "not normal, faster than the 80% interval; check the unit" in text


def test_an_undecided_diagnosis_says_first_what_would_decide() -> None:
    """How likely the likeliest cause would be after the check: the sum of each outcome's best."""
    found = ddpsim.diagnose(scenario(ONE_NODE), "150 ms")
    assert not found.is_decided
    assert found.check
    best: dict[str, float] = {}
    known = {cause.key: cause.probability for cause in found.causes}
    for outcome in found.check.outcomes:
        best[outcome.shows] = max(best.get(outcome.shows, 0.0), known[outcome.cause])
    assert found.check.expected == pytest.approx(sum(best.values()))
    assert found.check.expected > max(known.values())
    first, *_ = render_diagnosis(found, "job.yaml").splitlines()
    assert first.startswith("Undecided: the likeliest cause has ")
    for shows in best:
        of_outcome = [each.probability for each in found.check.outcomes if each.shows == shows]
        assert sum(of_outcome) == pytest.approx(1)


def test_every_cause_has_a_probability_on_the_screen(slow: ddpsim.Diagnosis) -> None:
    """Probabilities of the table, and the sum of all others."""
    rows = render_diagnosis(slow, "job.yaml").splitlines()
    start = next(i for i, row in enumerate(rows) if "would be " in row and "on 1 GPU" in row)
    table = rows[start + 1 : rows.index("", start)]
    listed = [cause for cause in slow.causes if cause.predicts]
    assert len(table) == len(listed) + 1
    assert table[-1].split()[1:] == [str(len(slow.causes) - len(listed)), "others"]
    assert sum(int(row.split("%")[0]) for row in table) == pytest.approx(100, abs=len(table))


def test_two_accumulations_tell_what_comes_once_a_step() -> None:
    """That which each micro-batch takes is the slope; they are of the same GPUs and network."""
    job = Job("a job", "", RESNET, TCP_NODES, ddp={"accumulation_steps": 4}).scenario()
    found = ddpsim.diagnose(job, "accumulation 1: 1.1 s, accumulation=4: 1.4 s, 1: 0.31 s")
    assert [each.measurement.setting for each in found.measured] == [
        (4, 1, 1, None),
        (4, 1, 4, None),
        (1, 1, None, None),
    ]
    text = render_diagnosis(found, "job.yaml")
    assert "step, 4 x 1, accumulation 4       1.40 s" in text
    assert "each micro-batch                  100 ms" in text
    assert "once a step                       1.00 s" in text
    assert found.normal is False  # the second is the scenario's own step
    batches = ddpsim.diagnose(job, "batch 32: 1.1 s, batch 64: 1.2 s")
    assert "each sample                      3.12 ms" in render_diagnosis(batches, "job.yaml")
    of_more, of_own = batches.measured
    assert of_more.predicted_s < of_own.predicted_s


def test_no_loader_is_to_blame_where_nothing_waits_for_data() -> None:
    job = Case.of(scenario(ONE_NODE))
    for wait, is_asked in (("synthetic", False), ("0 ms", False), ("60 ms", True)):
        found = diagnose(job, "150 ms", data_wait=wait)
        assert ("slow_loader" in {cause.key for cause in found.causes}) == is_asked


def test_what_a_cause_predicts_is_simulated(slow: ddpsim.Diagnosis) -> None:
    """Pasting its settings into the scenario gives the same step."""
    stated = [cause for cause in slow.causes if cause.predicts and cause.settings]
    assert stated
    for cause in stated:
        changed = Job("a job", "", RESNET, ONE_NODE).scenario(*cause.settings)
        assert cause.predicts
        assert resolve(changed).step_s() == pytest.approx(cause.predicts.step_s)


def exposed_s(name: str) -> tuple[float, float]:
    """What a healthy job is predicted to wait by `diagnose`, and by `run` on the slowest rank."""
    job = ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", ["run.iterations=4"])
    job = job.having("run", jitter=None)
    said = ddpsim.simulate(job)
    causes = ddpsim.diagnose(job, f"{1e3 * said.iteration_time_s.mean} ms").causes
    (predicts,) = (each.predicts for each in causes if each.key == "healthy")
    assert predicts
    return predicts.exposed_s, said.exposed_comm_s


@pytest.mark.parametrize("name", ["gpt2-xl-fully-shard", "slow-network"])
def test_exposed_communication_is_that_of_run(name: str) -> None:
    diagnosed_s, run_s = exposed_s(name)
    assert diagnosed_s == pytest.approx(run_s, rel=1e-6)


def test_a_usual_rank_waits_where_a_slow_one_is_busy() -> None:
    diagnosed_s, run_s = exposed_s("straggler")
    assert diagnosed_s > 2 * run_s


def test_a_step_without_its_cause_is_as_much_shorter_as_predicted(slow: ddpsim.Diagnosis) -> None:
    cause = slow.causes[0]
    assert cause.predicts
    healthy_s = resolve(scenario(ONE_NODE)).step_s()
    assert cause.mended_s == pytest.approx(0.150 * healthy_s / cause.predicts.step_s)


def test_the_check_tells_the_two_likeliest_apart(slow: ddpsim.Diagnosis) -> None:
    first, second = slow.causes[:2]
    assert slow.check
    shows = {outcome.cause: outcome.shows for outcome in slow.check.outcomes}
    assert shows[first.key] != shows[second.key]
    assert slow.check.key != "without_sync"


def test_more_measurements_narrow_it() -> None:
    """A slow rank and a slow network make the same step; an all-reduce tells them apart."""
    job = Case.of(scenario(IB_NODES))
    few = diagnose(job, "130 ms", exposed="50 ms")
    more = diagnose(job, "130 ms", exposed="50 ms", all_reduce="64 MiB: 1.8 ms")
    known = {cause.key: cause.probability for cause in few.causes}
    assert known["slow_rank"] < 0.6
    assert more.causes[0].key == "slow_rank"
    assert more.causes[0].probability > 0.95
    assert more.check is None


def keys(case: ddpsim.Scenario) -> set[str]:
    return {hypothesis.key for hypothesis in hypotheses_of(Case.of(case))}


def test_only_what_can_apply_is_asked() -> None:
    one_node, over_ib, over_tcp = (keys(scenario(c)) for c in (ONE_NODE, IB_NODES, TCP_NODES))
    between = {"sockets", "no_gpudirect", "fewer_nics", "congestion", "management_network"}
    assert not between & one_node
    assert between <= over_ib
    assert "no_peer_to_peer" in one_node & over_ib
    assert "no_peer_to_peer" not in over_tcp
    assert "tcp_stream_limit" in over_tcp - over_ib
    assert {"sockets", "fewer_nics"}.isdisjoint(over_tcp)
    assert "other_precision" not in one_node  # whose step was measured
    assert "hook_missing" not in one_node
    alone = keys(scenario({**ONE_NODE, "gpus_per_node": 1}))
    assert alone <= {"healthy", "slow_gpus", "other_batch", "slow_loader", "shared_loader"} | {
        *("unused_parameters", "small_buckets", "loss_read", "anomaly_mode")
    }
    measured = keys(load("resnet50-nccl-log"))
    assert "no_peer_to_peer" not in measured  # the log says what the links do
    assert "slow_collectives" in measured
    assert "busy_host" not in keys(load("gloo-cpu"))


def test_every_cause_is_whole() -> None:
    names = [hypothesis.key for hypothesis in HYPOTHESES]
    assert len(names) == len(set(names)) > 20
    for hypothesis in HYPOTHESES:
        assert hypothesis.remedy
        assert hypothesis.odds > 0
        assert "{" not in hypothesis.in_words(1.0)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("gloo-cpu", 3.0),
        ("data-parallel", 0.9),
        ("own-model", 0.4),
        ("straggler", 0.4),
    ],
)
def test_every_kind_of_scenario_is_diagnosed(name: str, seconds: float) -> None:
    found = ddpsim.diagnose(load(name), f"{seconds} s")
    assert found.causes
    assert found.normal is False
    text = render_diagnosis(found, f"{name}.yaml")
    for row in text.splitlines():  # but for what a shell must find on one line
        assert len(row) <= 100 or "--" in row or "grep" in row
    assert found.to_dict()["schema"] == "ddpsim.diagnosis/1"


def test_steps_on_fewer_gpus_are_of_what_is_there() -> None:
    """Of a straggler and a log on eight ranks, a step on fewer has neither."""
    found = ddpsim.diagnose(load("straggler"), "2: 0.165 s, 8: 0.2 s")
    two, eight = found.measured
    assert two.predicted_s < 0.9 * eight.predicted_s
    logged = ddpsim.diagnose(load("resnet50-nccl-log"), "1 GPU: 75 ms, 8: 76 ms")
    assert logged.is_healthy


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, 'measured: nothing was measured; give a step such as "916 ms"'),
        ({"measured": "916"}, "measured: 916 has no unit"),
        ({"measured": "0 ms"}, "measured: a step takes longer than 0 s"),
        ({"measured": "2 GPUs 5 ms"}, "measured: '2 GPUs 5 ms' has the unknown unit"),
        ({"measured": "two: 5 ms"}, "measured: 'two' is no number of GPUs; write"),
        ({"measured": "0: 5 ms"}, "measured: '0' has no GPU; write"),
        ({"measured": "9: 5 ms"}, "measured: 9 GPUs do not fill nodes of 8; .* in 2x8"),
        ({"measured": "8: 5 ms, 8 GPUs: 6 ms"}, "has two times for 1 x 8; keep one"),
        ({"measured": "batch 8: 5 ms, 8 GPUs batch 8: 6 ms"}, "has two times for 1 x 8; keep one"),
        ({"measured": "accumulation 0: 5 ms"}, "'accumulation 0' has no sample; write"),
        ({"measured": "accumulation x: 5 ms"}, "'accumulation x' is no number of GPUs; write"),
        ({"measured": "5 ms,"}, "has an entry without a time"),
        ({"measured": "2000 h"}, "out of range: wanted at most 1000 h"),
        ({"measured": "1: 1 ms," * 200}, "is too long"),
        ({"exposed": "-1 ms"}, "exposed: '-1 ms' is negative"),
        ({"measured": "5 ms", "exposed": "6 ms"}, "exposed: 6.00 ms is longer than the step"),
        ({"measured": "5 ms", "data_wait": "6 ms"}, "data_wait: 6.00 ms is longer than the step"),
        ({"measured": "95 ms", "without_sync": "400 ms"}, "sends nothing takes less; give both"),
        ({"all_reduce": "1 MiB: 5 ms, 1 MiB: 6 ms"}, "has two times for 1 MiB; keep one"),
        ({"all_reduce": "5 ms"}, "all_reduce: '5 ms' lacks the size of the all-reduce; write"),
        ({"all_reduce": "1 B: 5 ms"}, "all_reduce: '1 B' is too small"),
    ],
)
def test_text_that_says_nothing_is_refused(texts: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        ddpsim.diagnose(scenario(ONE_NODE), **texts)
    assert f"{refused.value.key}:" in str(refused.value)


def test_all_reduces_that_nothing_is_known_of_are_refused(cli: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="one rank has no all-reduce; leave it out"):
        ddpsim.diagnose(scenario({**ONE_NODE, "gpus_per_node": 1}), all_reduce="1 MiB: 1 ms")
    logged = str(ROOT / "scenarios" / "resnet50-nccl-log.yaml")
    done = cli("diagnose", logged, "--measured-all-reduce", "100 GB: 1 s")
    assert done.code == 2
    assert "cluster.all_reduce: a message of 93.1 GiB lies outside the sizes measured" in done.err


def test_bad_options_are_named(cli: Callable[..., Any]) -> None:
    path = str(ROOT / "scenarios" / "slow-job.yaml")
    for options, message in (
        ((), "Invalid value for --measured: nothing was measured"),
        (("--measured", "5"), "Invalid value for --measured: 5 has no unit"),
        (("--measured-data-wait", "x"), "Invalid value for --measured-data-wait: 'x' is not"),
    ):
        done = cli("diagnose", path, *options)
        assert done.code == 2
        assert message in " ".join(done.err.split())


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ddpsim.ScenarioError, match=r"cluster\.gpus_per_node"):
        ddpsim.diagnose(load("machines-64xh100"), "1x16: 5 ms")


def seen(*logs: float, noise: float = 0.1) -> Seen:
    return Seen(np.array(logs), np.full(len(logs), noise))


def test_the_likelihood_integrates_over_the_uncertain_inputs() -> None:
    """Against a sum over the values of two shared inputs, each measurement then on its own."""
    effects, values = np.array([[0.3, 0.1], [0.0, 0.2]]), np.array([1.0, 2.0])
    measured = seen(1.2, 2.3)
    grid = np.linspace(-8, 8, 801)
    weight = np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi) * (grid[1] - grid[0])
    total = 0.0
    for own, part in zip(grid, weight, strict=True):
        shifted = values[:, None] + own * effects[0][:, None] + grid * effects[1][:, None]
        off = (measured.logs[:, None] - shifted) / measured.noise[:, None]
        normal = np.exp(-0.5 * off**2) / (measured.noise[:, None] * np.sqrt(2 * np.pi))
        total += part * float(np.sum(weight * normal.prod(axis=0)))
    assert log_likelihood(measured, values, effects) == pytest.approx(log(total), abs=1e-6)


def test_a_graded_cause_may_have_any_size() -> None:
    values = [np.array([0.0]), np.array([1.0])]
    none = np.zeros((1, 1))
    between = fit(seen(0.5), (1.0, 4.0), values, none, graded=True)
    assert between.size == pytest.approx(2.0)
    steps = fit(seen(0.5), (1.0, 4.0), values, none, graded=False)
    assert between.log_likelihood > steps.log_likelihood
    milder = fit(seen(0.5), (1.0, 4.0), values, none, graded=True, falls=2.0)
    assert milder.log_likelihood < between.log_likelihood


def test_the_posterior_is_bayes_rule() -> None:
    found = posterior({"a": 3.0, "b": 1.0}, {"a": log(0.2), "b": log(0.6)})
    assert found == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}
    far = posterior({"a": 1.0, "b": 1.0}, {"a": -2000.0, "b": -1000.0})
    assert far["b"] == pytest.approx(1.0)
    assert far["a"] == pytest.approx(exp(-1000.0))


def test_a_healthy_bert_is_no_slow_one() -> None:
    """What is measured as predicted is healthy, whatever else is measured of it."""
    job = Case.of(Job("b", "", BERT, ONE_NODE).scenario())
    for texts in ({}, {"without_sync": "110 ms"}, {"data_wait": "0 s"}):
        found = diagnose(job, f"{1e3 * job.step_s} ms", **texts)
        assert found.is_healthy
        assert found.normal
