"""Records as they are read, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measured.made_measurements import gloo_record

from calibrate.fit.profile import fit_logs, fit_profile
from calibrate.fit.samples import FitError
from calibrate.records.record import Record, load_record
from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog


def test_a_log_is_no_record(tmp_path: Path) -> None:
    log = tmp_path / "all_reduce.log"
    log.write_text("# nThread 1 nGpus 1 minBytes 8\n", encoding="utf-8")
    told = r"is no ddpsim\.record/1 record \(logs of nccl-tests go through `calibrate import nccl-"
    with pytest.raises(ImportFailedError, match=told):
        load_record(log)


def _loaded(tmp_path: Path, record: Record, change: Callable[[dict[str, Any]], object]) -> Record:
    """A record as it is read back, once its document was changed."""
    path, document = tmp_path / "record.json", json.loads(record.model_dump_json(by_alias=True))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_record(path)


@pytest.mark.parametrize("key", ["samples_s", "warmup_s"])
def test_a_negative_time_is_refused_as_the_record_is_read(tmp_path: Path, key: str) -> None:
    with pytest.raises(ImportFailedError, match=rf"0\.{key}\.1: -1\.0 is out of range"):
        _loaded(tmp_path, gloo_record(), lambda d: d["measurements"][0].update({key: [0.1, -1.0]}))
    by_rank = {"samples_by_rank_s": [[0.1], [-1.0]]}
    with pytest.raises(ImportFailedError, match=r"rank_s\.1\.0: -1\.0 is out of range"):
        _loaded(tmp_path, gloo_record(), lambda d: d["measurements"][0].update(by_rank))


def test_a_record_must_name_its_schema(tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=r"is no ddpsim\.record/1 .*: schema: is missing"):
        _loaded(tmp_path, gloo_record(), lambda document: document.pop("schema"))


def test_a_record_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path, record = tmp_path / "record.json", gloo_record()
    path.write_text(record.model_dump_json(by_alias=True), encoding="utf-8-sig")
    assert load_record(path) == record


def test_a_record_that_holds_a_measurement_twice_is_refused() -> None:
    record = gloo_record()
    twice = record.model_copy(update={"measurements": record.measurements * 2})
    said = r"^a\.json holds all_reduce alone of 1\.00 KiB on 2 x 1 ranks twice, which would count"
    with pytest.raises(FitError, match=said):
        fit_profile([twice], "x", ["a.json"])


def test_records_with_too_few_measurements_are_named() -> None:
    record = gloo_record()
    first = record.model_copy(update={"measurements": record.measurements[:1]})
    none = record.model_copy(update={"measurements": ()})
    for few, said in (
        (first, r"^a\.json: message sizes are too few \(1\): measure 5 or more"),
        (none, r"^a\.json: no all-reduce of two ranks or more was measured"),
    ):
        with pytest.raises(FitError, match=said):
            fit_profile([few], "x", ["a.json"])
    log = AllReduceLog("a.txt", "nccl-tests log", 1, 4, ((1024, 1e-5),), ())
    with pytest.raises(FitError, match=r"^a\.txt: message sizes on 1 x 4 ranks are too few \(1\)"):
        fit_logs([log], "x")
