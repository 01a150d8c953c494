"""All-reduce times in CSV."""

from __future__ import annotations

import pytest
from logs.measured_files import Write

from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce


def test_csv_with_comments_other_columns_and_another_order(write: Write) -> None:
    text = (
        "# SYNTHETIC\n"
        "size_bytes,nodes,gpus_per_node,note,time_us\n"
        "8,2,8,a,11.5\n"
        "1048576,2,8,b,140\n"
    )
    log = read_all_reduce(write(text, "file.csv"))
    assert (log.kind, log.world_size) == ("all-reduce CSV", 16)
    assert log.samples == ((8, pytest.approx(11.5e-6)), (1_048_576, pytest.approx(140e-6)))


def test_a_column_named_twice(write: Write) -> None:
    text = "# SYNTHETIC\nsize_bytes,time_us,time_us,nodes,gpus_per_node\n8,11.5,99,2,8\n"
    with pytest.raises(
        ImportFailedError, match=r"file\.txt:2: names the column time_us twice; keep"
    ):
        read_all_reduce(write(text))


def test_csv_columns_in_any_order(write: Write) -> None:
    text = "nodes,gpus_per_node, time_us,size_bytes\n2,8,11.5,8\n"
    assert read_all_reduce(write(text)).samples == ((8, pytest.approx(11.5e-6)),)
