"""`--resume`: what goes on with a record, and which records it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from measured.measuring import ranks, small_plan

from calibrate.measure.cluster.plan import Options
from calibrate.measure.cluster.session import measure
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import check_same_machine
from calibrate.records.record import Record

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """A small record of two ranks."""
    path = tmp_path_factory.mktemp("copies") / "record.json"
    return path, ranks(2, path, only=("device_copy",))


def test_resume_refuses_the_record_of_another_layout_or_machine(
    copies: tuple[Path, Record], tmp_path: Path, alone: None
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(copies[0].read_bytes())
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path, resume=True))
    assert str(raised.value) == (
        f"{path} was measured with gpus_per_node 2, but this job has 1: name another file"
    )
    document = json.loads(path.read_text())
    document["environment"]["machine"] = "abacus"
    path.write_text(json.dumps(document))
    with pytest.raises(MeasureError, match="was measured with machine abacus, but this job has "):
        measure(Options(output=path, resume=True))


def test_resume_refuses_another_processor_of_the_same_name(
    copies: tuple[Path, Record], tmp_path: Path
) -> None:
    here = copies[1].environment
    assert here.processor
    elsewhere = here.model_copy(update={"details": here.details | {"processor": "model 3"}})
    silent = here.model_copy(update={"details": {}})
    record, fresh = copies[1], copies[1]
    path = tmp_path / "record.json"
    said = f"was measured with processor model 3, but this job has {here.processor}: name another"
    with pytest.raises(MeasureError, match=re.escape(said)):
        check_same_machine(record.model_copy(update={"environment": elsewhere}), fresh, path)
    check_same_machine(record.model_copy(update={"environment": silent}), fresh, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variables": {"OMP_NUM_THREADS": "7"}}, "with OMP_NUM_THREADS 7, but this job has "),
        ({"rate": 2e9}, "with --line-rate 16 Gbit/s, but this job has 8 Gbit/s: name another"),
    ],
)
def test_resume_refuses_other_settings(
    change: dict[str, Any], said: str, tmp_path: Path, alone: None
) -> None:
    path = tmp_path / "record.json"
    options = Options(output=path, line_rate_bytes_per_s=1e9, resume=True)
    measure(options, small_plan())
    document = json.loads(path.read_text())
    document["environment"]["variables"] |= change.get("variables", {})
    document["layout"]["line_rate_bytes_per_s"] = change.get("rate", 1e9)
    path.write_text(json.dumps(document))
    with pytest.raises(MeasureError, match=f"was measured {said}"):
        measure(options, small_plan())


def test_resume_may_add_the_line_rate(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    for rate, kept in ((None, None), (1e9, 1e9), (None, 1e9)):
        options = Options(output=path, line_rate_bytes_per_s=rate, resume=True)
        assert measure(options, small_plan()).layout.line_rate_bytes_per_s == kept


def test_resume_says_what_is_wrong_with_a_damaged_record(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    path.write_text("{")
    with pytest.raises(MeasureError, match=r"record\.json"):
        measure(Options(output=path, resume=True), small_plan())
