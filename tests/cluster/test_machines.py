"""Machines and links of the catalogue, as they are or with some keys stated."""

from __future__ import annotations

import itertools
import re
from copy import deepcopy
from typing import Any

import pytest
from clusters.collectives import MIB, WORKLOAD, cluster, simulated, time_in, time_of

from ddpsim.cluster.link_sources import link_provenance
from ddpsim.cluster.wires import Wires
from ddpsim.errors import InputError, ScenarioError
from ddpsim.planning.options import parse_sizes
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.catalog import device_table, machine_names, machine_table
from ddpsim.scenario.catalog import resolve as resolve_name
from ddpsim.scenario.links import InterNode


def _has_nvlink(name: str) -> bool:
    """Whether the GPUs of a machine are joined directly."""
    link = device_table(machine_table(name)["device"])["intra_node"]
    return bool(link.get("path") == "nvlink")


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_can_be_asked(name: str) -> None:
    table = machine_table(name)
    sets = {"nccl_env", "network_sigma", "nvlink_domain"}.intersection(table)
    links = {"intra_node", "inter_node"} & table.keys()
    assert set(table["sources"]) == {"cpu_vendor"} | links | sets
    backend = {"ddp": {"backend": "gloo"}} if table["device"] == "cpu-core" else {}
    for nodes in (1, 2, 5):
        if nodes * table["gpus_per_node"] == 1:
            continue
        scenario = load_cluster(cluster(machine=name, nodes=nodes) | backend)
        assert scenario.cluster.gpus_per_node == table["gpus_per_node"]
        rows = collective_table(scenario, "all_reduce", [4, 25 * MIB]).rows
        assert all(row.time_s > 0 for row in rows)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("name", [name for name in machine_names() if _has_nvlink(name)])
def test_twice_the_bytes_take_no_less_and_at_most_a_bit_more_than_twice(
    name: str, nodes: int
) -> None:
    scenario = load_cluster(cluster(machine=name, nodes=nodes))
    rows = collective_table(scenario, "all_reduce", [2**power for power in range(10, 31)]).rows
    for half, whole in itertools.pairwise(row.time_s for row in rows):
        assert half <= whole <= 2.2 * half


@pytest.mark.parametrize("name", machine_names())
def test_a_machines_network_is_that_of_its_source(name: str) -> None:
    """Which begins with NICs and line rate, and ends with who tested the preset."""
    table = machine_table(name)
    link, source = table["inter_node"], table["sources"]["inter_node"]
    written = re.match(r"(?:Assumed )?(\d+) x (\d+) Gbit/s ", source)
    assert written
    nics, gbit_per_s = map(int, written.groups())
    assert link["nics_per_node"] == nics
    assert link["bandwidth_bytes_per_s"] == gbit_per_s * 1e9 / 8
    assert "; tested by " in source or source.endswith("; no published collective tests it")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("hgx-h100", "dgx-h100"),
        ("HGX B200", "dgx-b200"),
        ("CoreWeave H100", "dgx-h100"),
        ("Standard_ND96isr_H100_v5", "nd96isr-h100-v5"),
        ("ND96asr_v4", "nd96asr-v4"),
        ("BM.GPU.A100-v2.8", "bm.gpu.a100-v2.8"),
        ("a3-megagpu-8g", "a3-mega"),
        ("P5en.48xlarge", "p5en.48xlarge"),
    ],
)
def test_a_machine_may_be_written_as_its_cloud_does(written: str, name: str) -> None:
    assert resolve_name("machine", written) == name


def test_a_machine_leaves_what_the_scenario_says() -> None:
    scenario = load_cluster(cluster(machine="dgx-a100", gpus_per_node=4, device="a100-sxm-40gb"))
    assert scenario.cluster.gpus_per_node == 4
    assert scenario.cluster.device.name == "a100-sxm-40gb"


def test_an_unknown_machine_is_named_with_its_nearest() -> None:
    with pytest.raises(ScenarioError) as refused:
        load_cluster(cluster(machine="dgx-h10"))
    (problem,) = refused.value.problems
    assert problem.key == "cluster.machine"
    assert "Nearest: dgx-h100, " in problem.message


def test_a_leaf_switch_spares_the_spine() -> None:
    inter = {"bandwidth": "100 Gbit/s", "nics_per_node": 8, "oversubscription": 4}
    spine = time_of(machine="dgx-a100", nodes=4, inter_node=inter)
    leaf = time_of(machine="dgx-a100", nodes=4, inter_node=inter | {"nodes_per_leaf": 4})
    assert spine > 3 * leaf
    assert time_of(machine="dgx-a100", nodes=8, inter_node=inter | {"nodes_per_leaf": 4}) > 3 * leaf


def test_collisions_are_drawn_with_the_seed() -> None:
    inter = {"bandwidth": "100 Gbit/s", "nics_per_node": 8, "uplinks": 8}
    asked = cluster(machine="dgx-a100", nodes=8, inter_node=inter)
    times = set()
    for seed in range(5):
        scenario = load_cluster(asked | {"run": {"seed": seed}})
        assert time_in(scenario) == time_in(scenario)
        times.add(time_in(scenario))
    assert len(times) > 1
    alone = time_of(machine="dgx-a100", nodes=8, inter_node=inter | {"uplinks": 10_000})
    assert min(times) > alone


@pytest.mark.parametrize("algorithm", ["direct", "halving_doubling"])
def test_messages_inside_a_node_take_its_own_links(algorithm: str) -> None:
    """Of 8 GPUs' 100 MB 8 x 50 MB leave a node of 3.12 GB/s each way, twice: 256 ms."""
    asked = {
        "device": "a100",
        "nodes": 2,
        "gpus_per_node": 8,
        "intra_node": {"bandwidth": "240 GB/s", "latency": "3 us"},
        "inter_node": {"bandwidth": "25 Gbit/s", "latency": "5 us"},
        "algorithm": algorithm,
    }
    assert time_of(10**8, **asked) == pytest.approx(0.256, rel=0.01)
    slots = {"intra_node": {"bandwidth": "6 GB/s", "latency": "10 us"}}
    wide = {"inter_node": {"bandwidth": "400 Gbit/s", "latency": "5 us", "nics_per_node": 4}}
    through_slots_s = 2 * 15 / 16 * 1e9 / 6e9
    assert time_of(10**9, **asked | slots | wide) == pytest.approx(through_slots_s, rel=0.01)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize(
    "null",
    [
        "cluster.inter_node.bandwidth=null",
        "cluster.intra_node={bandwidth: null, latency: null, switch_bandwidth: null}",
        "cluster.other_nodes={0: {inter_node: {bandwidth: null, latency: null}}}",
        "cluster.other_nodes={0: {intra_node: {bandwidth: null}}, 1: {inter_node: null}}",
    ],
)
def test_null_states_nothing_of_a_link(null: str, algorithm: str) -> None:
    plain = cluster(machine="dgx-h100", nodes=2, algorithm=algorithm)
    base = {"schema": "ddpsim/1", "workload": WORKLOAD, **plain}
    stated = deepcopy(base)
    if null.startswith("cluster.inter_node"):
        stated["cluster"]["inter_node"] = {"bandwidth": "25 Gbit/s"}
    said, asked = load_scenario(stated, (null,)), load_scenario(base)
    assert Wires.of(said.cluster) == Wires.of(asked.cluster)
    assert resolve(said).network == resolve(asked).network


@pytest.mark.parametrize(
    "machine", ["g4dn.12xlarge", "dgx-1-v100", "workstation-2x4090", "dgx-h100"]
)
def test_data_parallel_is_slower_than_ddp(machine: str) -> None:
    """GPU 0's link and memory are named."""
    one = {"schema": "ddpsim/1", "workload": {"model": "vgg16", "batch_per_rank": 16}}
    asked = one | cluster(machine=machine)
    ddp = simulate(load_scenario(asked))
    single = simulate(load_scenario(asked, ("cluster.algorithm=data_parallel",)))
    assert single.iteration_time_s.mean > ddp.iteration_time_s.mean
    assert single.bottleneck.text.startswith("GPU 0's link")
    assert any("GPU 0 alone holds" in warning for warning in single.warnings)


def test_a_parameter_servers_link_is_named() -> None:
    single = simulated(
        "cluster.algorithm=parameter_server", "cluster.inter_node={bandwidth: 1 GB/s}"
    )
    assert single.bottleneck.text.startswith("the parameter server's link")
    many = simulated(
        "cluster.algorithm=parameter_server",
        "cluster.servers=2",
        "cluster.inter_node={bandwidth: 1 GB/s}",
    )
    assert many.iteration_time_s.mean < single.iteration_time_s.mean


def test_a_partly_stated_network_keeps_the_rest_of_the_machines() -> None:
    whole = cluster(machine="p4d.24xlarge", nodes=2)
    same = cluster(machine="p4d", nodes=2, inter_node={"bandwidth": "100 Gbit/s"})
    half = cluster(machine="p4d", nodes=2, inter_node={"oversubscription": 2})
    at = [time_in(load_cluster(asked), 2**30) for asked in (whole, same, half)]
    assert at[0] == at[1]
    assert at[2] == pytest.approx(2 * at[0], rel=0.1)
    alone = cluster(device="a100", gpus_per_node=8, nodes=2, inter_node={"bandwidth": "25 Gbit/s"})
    link = load_cluster(alone).cluster.link("inter_node")
    assert link is not None
    assert link.nics_per_node == 1  # type: ignore[union-attr]


def test_another_transport_has_another_latency() -> None:
    asked = cluster(machine="dgx-h100", nodes=2, inter_node={"transport": "tcp"})
    link = load_cluster(asked).cluster.link("inter_node")
    assert link is not None
    assert link.latency_s == 45e-6


@pytest.mark.parametrize(
    ("device", "bandwidth", "transport"),
    [
        ("a100-sxm-80gb", "10 Gbit/s", "tcp"),
        ("a100-sxm-80gb", "25 Gbit/s", "tcp"),
        ("a100-sxm-80gb", "40 Gbit/s", "rdma"),
        ("rtx-4090", "25 Gbit/s", "tcp"),
        ("rtx-4090", "100 Gbit/s", "rdma"),
        ("rtx-4090", "400 Gbit/s", "rdma"),
        ("t4", "50 Gbit/s", "tcp"),
        ("l4", "100 Gbit/s", "tcp"),
        ("cpu-core", "100 Gbit/s", "tcp"),
    ],
)
def test_a_network_of_which_nobody_says_how_it_is_reached(
    device: str, bandwidth: str, transport: str
) -> None:
    """Sockets up to 25 Gbit/s, and below 100 where the device's usual machine has no RDMA.

    A usual machine with so fast a line (L4) keeps its sockets, and gloo has no other.
    """
    links = {"intra_node": {"bandwidth": "12 GB/s"}, "inter_node": {"bandwidth": bandwidth}}
    backend = {"ddp": {"backend": "gloo"}} if device == "cpu-core" else {}
    asked = cluster(device=device, gpus_per_node=2, nodes=2, **links) | backend
    link = load_cluster(asked).cluster.link("inter_node")
    assert isinstance(link, InterNode)
    assert link.transport == transport


def test_fast_nics_of_a_workstation_are_said_to_be_taken_as_rdma() -> None:
    """8 x 400 Gbit/s by TCP would be 5 GB/s each, and 45 us a hop."""
    fast = {"bandwidth": "400 Gbit/s", "nics_per_node": 8}
    asked = load_cluster(cluster(device="rtx-4090", gpus_per_node=8, nodes=2, inter_node=fast))
    said = link_provenance(asked.cluster, asks_transport=True)[-1].source
    assert said == "8 x 50.0 GB/s, taken as RDMA; stated in the scenario"


MACHINES = ["dgx-a100", "dgx-h100", "dgx-1-v100", "p4d", "g4dn", "dgx-b200"]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("nodes", [1, 2, 4, 64])
def test_larger_messages_take_longer(machine: str, nodes: int) -> None:
    """But where the tuner changes its choice: there it may err, by less than half."""
    scenario = load_cluster(cluster(machine=machine, nodes=nodes))
    rows = collective_table(scenario, "all_reduce", parse_sizes("1K..1G")).rows
    for small, large in itertools.pairwise(rows):
        assert large.time_s > (0.999 if small.choice == large.choice else 0.6) * small.time_s


def test_fewer_gpus_than_the_machine_has_are_allowed() -> None:
    assert load_cluster(cluster(machine="dgx-h100", gpus_per_node=4)).cluster.world_size == 4
    with pytest.raises(ScenarioError, match="16 is more than the 8 GPUs that dgx-h100 has"):
        load_cluster(cluster(machine="dgx-h100", gpus_per_node=16))
    with pytest.raises(InputError, match="more than the 8 GPUs"):
        load_cluster(cluster(machine="dgx-h100")).cluster.resized(2, 9)


@pytest.mark.parametrize(
    ("machine", "gpus", "stated", "nics"),
    [
        ("dgx-h100", 8, {}, 8),
        ("dgx-h100", 3, {}, 3),
        ("dgx-h100", 1, {"bandwidth": "200 Gbit/s"}, 1),
        ("dgx-h100", 1, {"nics_per_node": 8}, 8),
        ("p5", 2, {}, 8),
        ("frontier", 1, {}, 1),
        ("a2-highgpu-8g", 1, {}, 1),
    ],
)
def test_a_part_of_a_machine_has_the_nics_nearest_to_it(
    machine: str, gpus: int, stated: dict[str, Any], nics: int
) -> None:
    """NICs are taken in proportion to GPUs, rounded up, unless the scenario says how many."""
    links = {"inter_node": stated} if stated else {}
    asked = load_cluster(cluster(machine=machine, nodes=2, gpus_per_node=gpus, **links)).cluster
    link = asked.link("inter_node")
    assert isinstance(link, InterNode)
    assert link.nics_per_node == nics


def test_the_nics_left_out_are_named() -> None:
    def said(**links: Any) -> str:
        asked = load_cluster(cluster(machine="p5", nodes=2, gpus_per_node=2, **links)).cluster
        return link_provenance(asked, asks_transport=True)[-1].source

    assert "8 x 12.5 GB/s, 30.0 us, the nearest of 32 NICs to 2 of 8 GPUs; preset p5" in said()
    assert "nearest" not in said(inter_node={"nics_per_node": 32})


@pytest.mark.parametrize(("gpus", "measured_s"), [(1, 20.5e-3), (2, 10.5e-3)])
def test_10_nodes_of_one_or_two_h100_gather_as_measured(gpus: int, measured_s: float) -> None:
    """All-gathers of 1 GiB; with all eight NICs they would take 3 ms."""
    asked = cluster(machine="dgx-h100", nodes=10, gpus_per_node=gpus, nccl="2.29")
    (row,) = collective_table(load_cluster(asked), "all_gather", [1024 * MIB]).rows
    assert row.time_s == pytest.approx(measured_s, rel=0.12)


def test_a_smaller_node_of_a_machine_has_fewer_nics() -> None:
    scenario = load_cluster(
        cluster(machine="dgx-h100", nodes=2, other_nodes={1: {"gpus_per_node": 2}})
    )
    assert Wires.of(scenario.cluster).unlike == ((1, 1.0, 0.25),)


def test_the_bottleneck_is_what_would_shorten_messages() -> None:
    """NVLS loads the links inside a node less than a ring does."""

    def of(**links: object) -> str:
        cluster = {"nodes": 16, "gpus_per_node": 8, "device": "h100-sxm-80gb", **links}
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": cluster}
        return resolve(load_scenario(scenario)).network.bottleneck

    network = {"bandwidth": "100 Gbit/s", "latency": "20 us"}
    assert "the inter-node network (400 GB/s a node" in of()
    assert "network (12.5 GB/s a node, 20.0 us a hop)" in of(inter_node=network)
    assert "the intra-node links (365 GB/s a GPU" in of(algorithm="ring")


def test_links_that_leave_out_a_switch_say_so() -> None:
    """The device's usual machine sums in its switch, and stated links are another machine's."""

    def said(intra: dict[str, str] | None) -> str:
        cluster = {"nodes": 1, "gpus_per_node": 8, "device": "h100-sxm-80gb", "intra_node": intra}
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": cluster}
        network = resolve(load_scenario(scenario)).network
        return next(p.source for p in network.provenance if p.input == "cluster.intra_node")

    assert "no NVLS without switch_bandwidth" in said({"bandwidth": "365 GB/s"})
    assert "no NVLS" not in said({"bandwidth": "365 GB/s", "switch_bandwidth": "480 GB/s"})
    assert "no NVLS" not in said(None)


def test_links_inside_nodes_alone_tell_nothing_of_several() -> None:
    """However slow they are: which links set the pace is as doubtful as the links."""

    def sigma(nodes: int, **keys: Any) -> float:
        scenario = {"schema": "ddpsim/1", "workload": WORKLOAD, "cluster": {"nodes": nodes, **keys}}
        network = resolve(load_scenario(scenario)).network
        assert network.uncertainty
        return network.uncertainty.sigma

    slow = {"device": "t4", "gpus_per_node": 4, "intra_node": {"bandwidth": "6 GB/s"}}
    stated = {"inter_node": {"bandwidth": "50 Gbit/s"}, "algorithm": "ring"}
    fast = {"device": "h100-sxm-80gb", "gpus_per_node": 8, **stated}
    assert [sigma(nodes, **slow) for nodes in (1, 2, 16)] == [0.10, 0.83, 0.83]
    assert [sigma(nodes, **slow, **stated) for nodes in (1, 2)] == [0.10, 0.10]
    assert [sigma(nodes, **fast) for nodes in (1, 2)] == [0.25, 0.25]
    assert [sigma(nodes, machine="dgx-h100") for nodes in (1, 2, 32, 128)] == [0.09, *[0.12] * 3]
