"""The bottleneck is what would shorten the step most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from shipped_scenarios import load, suggested

import ddpsim
from ddpsim.planning.explain import sensitivities
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import BreakdownNs, Step, longest_wait
from ddpsim.result.model import Bottleneck
from ddpsim.result.summary import _bottleneck
from ddpsim.result.timeline import CommSpan, Span

WAITS_FOR_BUFFERS = (
    *("cluster={machine: dgx-h100, nodes: 128}", "workload.batch_per_rank=64"),
    "workload.grad_scaler=false",
)


def test_the_buffers_broadcast_is_named_where_the_step_waits_for_it() -> None:
    """Of 1,024 ranks, most of it latency, though the last of the buckets ends late too."""
    asked = ("resnet50-8xa100", *WAITS_FOR_BUFFERS)
    result = ddpsim.simulate(load(*asked))
    assert "the latency of the hops among 1,024 ranks" in result.bottleneck.text
    assert "mostly the buffers' broadcast before the forward" in result.bottleneck.text
    known = {one.what: one.change_s for one in sensitivities(resolve(load(*asked)))}
    assert known["half the latency"] < 2 * known["10 % more bandwidth on every link"]
    (own,) = [step for step in result.next_steps if "broadcast_buffers" in str(step.settings)]
    assert own.settings == ("ddp.broadcast_buffers=false",)
    assert "then differ between ranks" in own.why
    without = suggested(*asked, "ddp.broadcast_buffers=false")
    assert "broadcast_buffers" not in " ".join(without)


def test_a_stage_of_power_sgd_is_judged_by_what_it_sends() -> None:
    """Narrow matrices, which wait for latency where their bucket's bytes would not."""
    latency = "cluster.inter_node.latency=200 us"
    result = ddpsim.simulate(load("power-sgd", latency, "run.iterations=1"))
    assert "the latency of the hops among 8 ranks: each of 5 buckets" in result.bottleneck.text


@pytest.mark.parametrize(
    ("broadcast", "bucket", "unused", "words"),
    [
        (30, 10, 0, "mostly what is sent before the forward"),
        (10, 30, 0, "its one bucket ends after the backward"),
        (10, 0, 30, "mostly the all-reduce that tells which parameters are unused"),
    ],
)
def test_the_longest_wait_is_named(broadcast: int, bucket: int, unused: int, words: str) -> None:
    """A forward of 5 after the broadcast, a backward of 5 before what it leaves to wait for."""
    forward, backward = broadcast + 5, broadcast + 10
    late, end = backward + bucket, backward + bucket + unused
    compute = (
        Span("comm_wait", 0, broadcast),
        Span("forward", broadcast, forward),
        Span("backward", forward, backward),
        Span("comm_wait", backward, end),
    )
    comm = (
        CommSpan("broadcast", -1, 8, 0, 0, 0, 0, broadcast),
        CommSpan("all_reduce", 0, 8, 1, backward, backward, backward, late),
        CommSpan("all_reduce", -1, 4, 1, late, late, late, end),
    )
    longest, said, share = longest_wait(Step(0, end, forward, (), compute, comm), "what is sent")
    assert said == words
    assert share == 0.75
    assert longest.end_ns - longest.joined_ns == 30


def bottleneck(
    *each: dict[str, int],
    late_peers_ns: Sequence[int] = (0, 0),
    batches_us: float = 0.0,
    network_saves_us: float = math.inf,
    host_saves_us: float = math.inf,
) -> Bottleneck:
    """Of rank 0, the slowest, in steps of 1 ms, of such parts in us each, the rest forward."""
    steps = []
    for start_ns, parts in zip((0, 1_000_000), each, strict=True):
        now, host, comm = start_ns, [], []
        compute: list[Span] = []
        kinds = {"data_wait": host, "host": [], "comm_wait": compute}
        for kind, lasts_us in parts.items():
            end_ns = now + 1000 * lasts_us
            kinds.get(kind, compute).append(Span(kind, now, end_ns))  # type: ignore[arg-type]
            if kind == "comm_wait":
                comm.append(CommSpan("all_reduce", 0, 8, 1, now, now, now, end_ns))
            now = end_ns
        compute.append(Span("forward", now, start_ns + 1_000_000))
        lanes = tuple(host), tuple(compute), tuple(comm)
        steps.append(Step(start_ns, start_ns + 1_000_000, start_ns, *lanes))
    whole = sum((step.breakdown() for step in steps), BreakdownNs())
    context = SimpleNamespace(
        optimizes_on_host=False,
        network=lambda _: "links",
        broadcast="what is sent",
        reduced="bucket",
        batches_s=batches_us * 1e-6,
        network_saves_s=lambda: network_saves_us * 1e-6,
        host_saves_s=lambda: min(host_saves_us, 1000) * 1e-6,
    )
    return _bottleneck(whole, 0, late_peers_ns, steps, context)  # type: ignore[arg-type]


def test_a_host_costs_no_more_than_a_step_saves_without_it() -> None:
    """The device idles for both at once, and a faster host only lets the network end sooner."""
    both = {"host": 95, "comm_wait": 90}
    assert bottleneck(both, both).kind == "host"
    assert bottleneck(both, both, host_saves_us=40).kind == "communication"


IN_TURNS = "ranks are late in turns: each waits for others 90.0 us a step (9.0%)"


@pytest.mark.parametrize(
    ("parts", "late_us", "batches_us", "kind", "text"),
    [
        # compute 10 % faster would save 83.4 of its 917
        ({"comm_wait": 83}, (0, 0), 0, "compute", "compute takes 91.7% of the step"),
        (
            {"comm_wait": 90, "host": 89},
            (0, 0),
            0,
            "communication",
            "links: its one bucket ends after the backward, 90.0 us a step (9.0%)",
        ),
        (
            {"host": 91, "comm_wait": 90},
            (0, 0),
            0,
            "host",
            "the host launches too slowly: the device idles 91.0 us a step (9.1%)",
        ),
        # the slowest waits for 10 of its 50; the others for 10, 100, 110: the median for 90 more
        (
            {"comm_wait": 50},
            (10, 110, 100, 10),
            0,
            "stragglers",
            "rank 0 is last: the median rank waits 90.0 us a step (9.0%)",
        ),
        ({"comm_wait": 100}, (90, 130), 0, "stragglers", IN_TURNS),
        (
            {"data_wait": 90, "comm_wait": 80},
            (0, 0),
            0,
            "data",
            "the data loader: no batch is ready for 90.0 us a step (9.0%)",
        ),
        # a loader that every step waits for sets the pace, however short the waits are
        (
            {"data_wait": 20, "comm_wait": 300},
            (0, 0),
            900,
            "data",
            "the data loader: no batch is ready for 20.0 us a step (2.0%)",
        ),
        # and one whose batches take as long as a step, though nobody waits for them
        (
            {"comm_wait": 300},
            (0, 0),
            1000,
            "data",
            "the data loader: the batches of a step take 1.00 ms",
        ),
        (
            {"comm_wait": 300},
            (0, 0),
            999.8,
            "communication",
            "links: its one bucket ends after the backward, 300 us a step (30.0%)",
        ),
    ],
)
def test_the_bottleneck_by_hand(
    parts: dict[str, int], late_us: tuple[int, ...], batches_us: float, kind: str, text: str
) -> None:
    late_ns = [2 * 1000 * each for each in late_us]  # over both steps
    found = bottleneck(parts, parts, late_peers_ns=late_ns, batches_us=batches_us)
    assert (found.kind, found.text) == (kind, text)


def test_the_host_that_catches_up_while_the_network_sends_is_named() -> None:
    """100 us of a step wait for the network, without which it would be 30 shorter: 40 + 70."""
    parts = {"comm_wait": 100, "host": 40}
    found = bottleneck(parts, parts, network_saves_us=30)
    cost = "the device idles 110 us a step (11.0%), communication or not"
    assert (found.kind, found.text) == ("host", f"the host launches too slowly: {cost}")
    assert bottleneck(parts, parts, network_saves_us=90).kind == "communication"


def test_a_loader_that_one_step_did_not_wait_for_sets_no_pace() -> None:
    """20 us of one of two steps of 1 ms are data's, 300 of both communication's."""
    found = bottleneck({"data_wait": 20, "comm_wait": 300}, {"comm_wait": 300}, batches_us=900)
    assert found.kind == "communication"


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (5, "all 3 buckets end after the backward"),
        (10, "the last 2 of 3 buckets end after the backward"),
        (30, "the last of 3 buckets ends after the backward"),
    ],
)
def test_buckets_that_end_after_the_backward_are_counted(backward: int, words: str) -> None:
    compute = Span("backward", 0, backward), Span("comm_wait", backward, 40)
    optimizer = Span("optimizer", 40, 50)
    comm = [
        CommSpan("all_reduce", bucket, 8, 1, end_ns - 5, end_ns - 5, end_ns - 5, end_ns)
        for bucket, end_ns in enumerate((10, 30, 40))
    ]
    step = Step(0, 50, 0, (), (*compute, optimizer), tuple(comm))
    assert longest_wait(step, "what is sent")[1] == words


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("post-local-sgd", (), "mostly the average of the parameters, in steps that have one"),
        (
            "join",
            ("cluster.inter_node={bandwidth: 25 Gbit/s, latency: 2 ms, transport: rdma}",),
            "mostly join's all-reduce, which counts the ranks that have inputs",
        ),
    ],
)
def test_what_all_steps_wait_for_longest_is_named(
    name: str, settings: tuple[str, ...], words: str
) -> None:
    """An average in few steps may cost more than a broadcast in each."""
    assert words in ddpsim.simulate(load(name, *settings)).bottleneck.text


@pytest.mark.parametrize(
    ("name", "setting", "kind", "said"),
    [
        (
            "resnet50-8xa100",
            "workload.input_copy={sample_size: 50 MB}",
            "data",
            "the inputs' copies to the device take",
        ),
        (
            "llama-8b-offload",
            "ddp.fully_shard.offload_policy={host_optimizer: 1 GB/s}",
            "host",
            "the host's optimizer takes",
        ),
    ],
)
def test_copies_and_a_hosts_optimizer_are_named(
    name: str, setting: str, kind: str, said: str
) -> None:
    result = ddpsim.simulate(load(name, "run.iterations=1", setting))
    assert result.bottleneck.kind == kind
    assert result.bottleneck.text.startswith(said)
