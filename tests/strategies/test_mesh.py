"""HSDP and parameters kept in nodes: what theory says of their bytes, lanes, links and refusals."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from ddpsim.cluster.build import build_network
from ddpsim.cluster.mesh import _layouts, mesh_of
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.process_groups import GroupedCost, Mesh, cost_of
from ddpsim.cluster.transfers import TURNS, duration_ns
from ddpsim.errors import InputError, ScenarioError
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Communicate
from ddpsim.units import NS_PER_S

HSDP = "scenarios/gpt2-xl-hsdp.yaml"
FEW = ("workload.model=gpt2", "run.iterations=1")


def job(*settings: str) -> Job:
    return resolve(load_scenario(HSDP, [*FEW, *settings]))


def sent(job: Job) -> Counter[str]:
    """Bytes that a rank sends in a step, by its group and the operation."""
    mesh, total = mesh_of(job.scenario), Counter[str]()
    for i in job.program.steady_step:
        if isinstance(i, Communicate):
            members = mesh.size(i.group)
            part = (members - 1) / members * TURNS[i.operation]
            total[f"{i.operation} {i.group}"] += round(part * i.size_bytes)
    return total


def test_bytes_are_those_of_zero_in_a_node_and_of_ddp_between_nodes() -> None:
    """On 4 x 8 ranks: bfloat16 is gathered twice, but the root's; float32 is reduced."""
    found = job()
    padded = 4 * sum(group.gathered_bytes // 2 for group in found.program.strategy.groups)  # type: ignore[attr-defined]
    root = found.program.strategy.groups[0].gathered_bytes  # type: ignore[attr-defined]
    assert sent(found) == {
        "all_gather node": pytest.approx(7 / 8 * (padded - root), rel=1e-6),
        "reduce_scatter node": pytest.approx(7 / 8 * padded, rel=1e-6),
        "all_reduce across_nodes": pytest.approx(2 * 3 / 4 * padded / 8, rel=1e-6),
    }


def test_one_node_is_sharded_alone_and_one_gpu_a_node_is_replicated() -> None:
    hsdp, sharded = (
        predict(load_scenario(HSDP, [*FEW, "cluster.nodes=1", f"ddp.strategy={strategy}"]))
        for strategy in ("hsdp", "fully_shard")
    )
    assert hsdp.iteration_time_s == sharded.iteration_time_s
    assert hsdp.memory_bytes_per_gpu == sharded.memory_bytes_per_gpu
    assert set(sent(job("cluster.gpus_per_node=1"))) == {"all_reduce across_nodes"}


def test_a_node_keeps_a_copy_which_the_backward_gathers_there() -> None:
    """The forward's all-gathers cross the network, and the backward's do not."""
    kept = job("ddp.strategy=fully_shard", "ddp.fully_shard.reshard_after_forward=8")
    gathers = Counter(i.group for i in kept.program.steady_step if isinstance(i, Communicate))
    assert gathers == {"world": 13 + 13, "kept": 13}  # the root, and blocks; their reductions
    alone = job("ddp.strategy=fully_shard", "ddp.fully_shard.reshard_after_forward=1")
    free = job("ddp.strategy=fully_shard", "ddp.fully_shard.reshard_after_forward=false")
    assert alone.program.steady_step == free.program.steady_step


@pytest.mark.parametrize(
    ("nodes", "gpus", "kept_by", "layouts"),
    [
        (4, 8, 4, {((4,), 1)}),
        (4, 8, 16, {((8, 8), 1)}),
        (3, 8, 12, {((8, 4), 2), ((4, 8), 2)}),  # both send over the second node's NICs
        (2, 6, 4, {((4,), 1), ((2, 2), 1)}),
        (4, 1, 2, {((1, 1), 1)}),
    ],
)
def test_neighbours_that_keep_a_copy_may_be_on_several_nodes(
    nodes: int, gpus: int, kept_by: int, layouts: set[tuple[tuple[int, ...], int]]
) -> None:
    assert _layouts(Mesh(nodes * gpus, gpus, kept_by), "kept", gpus) == layouts


def test_a_copy_that_is_kept_by_fewer_is_gathered_sooner() -> None:
    """Inside half a node, a node, two nodes, and one and a half, which share the NICs of one."""
    nodes = ("ddp.strategy=fully_shard", "cluster.nodes=6", "cluster.intra_node.bandwidth=100 GB/s")

    def gather_ns(ranks: int) -> int:
        cost = job(*nodes, f"ddp.fully_shard.reshard_after_forward={ranks}").network.cost
        return duration_ns(cost_of(cost, "kept").transfer("all_gather", 2**28))

    half, whole, several, shared = (gather_ns(ranks) for ranks in (4, 8, 16, 12))
    assert half < whole < several < shared
    assert half == pytest.approx(3 / 4 * 2**28 / 100e9 * 1e9, rel=0.15)
    assert shared == pytest.approx(2 * 11 / 12 * 16 / 15 * several, rel=0.15)


def test_groups_have_links_of_their_own() -> None:
    """NVLink alone in a node; between nodes an eighth of four NICs, which all groups share."""
    scenario = load_scenario(HSDP, [*FEW, "cluster.inter_node.nics_per_node=4"])
    cost = build_network(scenario).cost
    assert isinstance(cost, GroupedCost)
    size = 2**28
    gather_s = duration_ns(cost_of(cost, "node").transfer("all_gather", size)) / NS_PER_S
    assert gather_s == pytest.approx(7 / 8 * size / 235e9, rel=0.12)
    reduce_s = duration_ns(cost_of(cost, "across_nodes").transfer("all_reduce", size)) / NS_PER_S
    assert reduce_s == pytest.approx(2 * 3 / 4 * size / (4 * 12.5e9 / 8), rel=0.12)
    parts = [getattr(each, "cost", each) for _, each in cost.parts]
    assert [part.graph.ranks for part in parts if isinstance(part, NcclCost)] == [8, 4]


def test_an_all_reduce_lets_the_next_reduce_scatter_begin() -> None:
    """It follows its own reduce-scatter, and has a communicator of its own."""
    slow = load_scenario(HSDP, [*FEW, "cluster.inter_node.bandwidth=1 GB/s"])
    collectives = predict(slow).collectives
    reduces = [each for each in collectives if each.operation == "all_reduce"]
    scatters = [each for each in collectives if each.operation == "reduce_scatter"]
    for scatter, reduce in zip(scatters, reduces, strict=True):
        assert reduce.ready_s == scatter.end_s
    for reduce, later in pairwise(reduces):
        assert later.start_s >= reduce.end_s
    assert scatters[2].start_s < reduces[0].end_s
    assert (scatters[0].group, reduces[0].group) == ("0-7", "0,8,16,24")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.weak_links={1: 0.5}"], "cluster.weak_links: is of all ranks, and says nothing"),
        (["cluster.background={rate: 1 GB/s}"], "cluster.background: is of all ranks"),
        (["workload.data={rate: 9 samples/s, sample_size: 1 MB}"], "are not modelled under"),
        (
            ["ddp.fully_shard.reshard_after_forward=3"],
            "3 does not divide the 8 ranks that share a copy; write 2, 4, default, true or",
        ),
        (["ddp.fully_shard.reshard_after_forward=half"], "'half' is neither true, nor false"),
        (["workload.sync_batch_norm=true"], "is not modelled under hsdp"),
    ],
)
def test_what_has_no_groups_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises((ScenarioError, InputError), match=message):
        resolve(load_scenario(HSDP, settings))


def post_local(*settings: str) -> Job:
    quick = ("run.iterations=1",)
    return resolve(load_scenario("scenarios/post-local-sgd.yaml", [*quick, *settings]))


def test_post_local_sgd_reduces_in_nodes_and_averages_among_all() -> None:
    """Every gradient in each step of a node; every parameter once in a period of all ranks."""
    found = post_local()
    steps = [found.program.step(found.program.warmup + number) for number in range(16)]
    nodes, world = (
        [
            sum(
                i.size_bytes
                for i in step
                if isinstance(i, Communicate) and i.operation == "all_reduce" and i.group == group
            )
            for step in steps
        ]
        for group in ("node", "world")
    )
    whole = found.model.gradient_bytes
    assert nodes == [whole] * 16
    assert sorted(world) == [0] * 14 + [whole] * 2
    before = found.program.strategy.steps[found.program.strategy.kind(0)]
    assert {i.group for i in before if isinstance(i, Communicate)} == {"world"}


def test_post_local_sgd_of_one_node_reduces_among_all() -> None:
    groups = {group for group, *_ in post_local("cluster.nodes=1").program.sent}
    assert groups == {"world"}


def test_an_average_takes_what_local_sgd_takes_for_it() -> None:
    """Between averages a step is DDP's on one node: the nodes have nothing to wait for.

    Ranks leave an average apart by what its last hops take, and are together again some steps
    later.
    """
    settings = ("ddp.broadcast_buffers=false",)
    rare, often = (
        post_local(*settings, f"ddp.post_local_sgd.period={period}").step_s() for period in (4, 2)
    )
    node = ("cluster.nodes=1", "ddp.post_local_sgd=null", "ddp.comm_hook=allreduce", *settings)
    alone_s = post_local(*node).step_s()
    assert often - alone_s == pytest.approx(2 * (rare - alone_s), rel=1e-3)


def test_post_local_sgd_may_reduce_no_gradients() -> None:
    """Then a step without an average sends nothing, and one with an average that alone."""
    found = post_local("ddp.post_local_sgd.post_local_gradient_allreduce=false")
    steps = [found.program.step(found.program.warmup + number) for number in range(8)]
    sent = [[i for i in step if isinstance(i, Communicate) and i.bucket >= 0] for step in steps]
    assert sorted(map(len, sent)) == [0] * 7 + [1]
    assert max(sent, key=len)[0].size_bytes == found.model.gradient_bytes
