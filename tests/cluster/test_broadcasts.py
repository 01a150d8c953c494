"""What a broadcast costs."""

from __future__ import annotations

from typing import Any

import pytest
from clusters.collectives import cluster

from ddpsim.cluster.build import build_network, with_sent_sizes
from ddpsim.cluster.wires import Wires
from ddpsim.prediction.collective_times import collective_table, load_cluster


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_broadcast_passes_the_message_once_round_the_ring(gpus: int) -> None:
    """Of links under LL half is left for the message; nobody is told of more than a link has."""
    links = {"intra_node": {"bandwidth": "10 GB/s", "latency": "10 us"}, "gpus_per_node": gpus}

    def time_s(**keys: Any) -> float:
        asked = cluster(machine=None, device="v100-sxm-32gb", algorithm="ring", **links, **keys)
        return collective_table(load_cluster(asked), "broadcast", [100_000_000]).rows[0].time_s

    assert time_s(protocol="Simple") == pytest.approx((gpus - 1) * 10e-6 + 10e-3)
    assert time_s(protocol="LL") == pytest.approx((gpus - 1) * 10e-6 + 20e-3)


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize(
    "algorithm", ["auto", "ring", "tree", "direct", "halving_doubling", "parameter_server"]
)
def test_no_broadcast_is_faster_than_its_slowest_link(algorithm: str, nodes: int) -> None:
    scenario = load_cluster(cluster(machine="dgx-1-v100", nodes=nodes, algorithm=algorithm))
    slowest = min(link.bandwidth_bytes_per_s for link in Wires.of(scenario.cluster).ring)
    (row,) = collective_table(scenario, "broadcast", [2**30]).rows
    assert row.busbw_bytes_per_s == row.algbw_bytes_per_s < slowest
    network = with_sent_sizes(build_network(scenario), [("all_reduce", 4)], [2**30])
    (told,) = (entry for entry in network.provenance if entry.input == "broadcast time")
    assert ("once round a ring" in told.source) == (algorithm != "parameter_server")
    assert told.trust == "assumed"
    negligible = with_sent_sizes(build_network(scenario), [("all_reduce", 2**30)], [4])
    assert not any(entry.input == "broadcast time" for entry in negligible.provenance)
