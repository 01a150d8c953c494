"""Bus bandwidths that users report from nodes of a cluster: each within its 80 % range."""

from __future__ import annotations

from typing import Any

import pytest
from clusters.collectives import cluster

from ddpsim.cluster.build import build_network
from ddpsim.prediction.collective_times import collective_table, load_cluster

GIB = 2**30
ROCE = {
    "device": "h100-sxm-80gb",
    "nodes": 5,
    "inter_node": {"bandwidth": "400 Gbit/s", "nics_per_node": 4},
}


@pytest.mark.parametrize(
    ("asked", "ms"),
    [
        ({"machine": "p4d.24xlarge", "nodes": 1}, 8.14),
        ({"machine": "p4d.24xlarge", "nodes": 2}, 35.2),
        ({"machine": "p4d.24xlarge", "nodes": 3}, 64.8),
        ({"machine": "p4d.24xlarge", "nodes": 4}, 70.2),
        (ROCE | {"algorithm": "ring"}, GIB * 2 * 39 / 40 / 190e6),
        (ROCE | {"algorithm": "tree"}, GIB * 2 * 39 / 40 / 150e6),
    ],
)
def test_an_all_reduce_of_1_gib_may_take_so_long(asked: dict[str, Any], ms: float) -> None:
    """Sources: nccl issues 527 (p4d) and 1368 (4 x 400 Gbit/s RoCE)."""
    keys = {"gpus_per_node": 8} | asked
    (row,) = collective_table(load_cluster(cluster(**keys)), "all_reduce", [GIB]).rows
    assert row.low_s <= ms / 1e3 <= row.high_s


@pytest.mark.parametrize("machine", ["p4d.24xlarge", "p4de.24xlarge"])
def test_the_range_names_what_tuned_images_reach(machine: str) -> None:
    network = build_network(load_cluster(cluster(machine=machine, nodes=2)), None)
    found = network.uncertainty_of(GIB)
    assert found is not None
    assert "tuned images reach 77 and 44" in found.basis
