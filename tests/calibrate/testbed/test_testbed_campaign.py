"""A campaign of rounds on a testbed: what it measures, again, and in which order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from measure_campaign import Campaign
from measure_campaign import main as campaign
from measured.made_rounds import made_up

from calibrate.files import save_json
from calibrate.records.record import Measurement, Record, load_record
from calibrate.testbed.errors import TestbedError


class _Testbed:
    """A testbed that writes what the ranks would have, or fails."""

    ran: list[str]

    def __init__(self, rates: Sequence[float], cores: Sequence[set[int]]) -> None:
        assert len(rates) == len(cores)
        self.rates = rates

    def __enter__(self) -> _Testbed:  # noqa: PYI034 -- typing.Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, commands: list[list[str]], variables: dict[str, str], timeout_s: float) -> None:
        assert list(variables) == ["PYTHONPATH"]  # nothing that users of `rounds` lack
        options = json.loads(commands[0][-1])
        assert options["line_rate_bytes_per_s"] == self.rates[0]
        if "cnn" in options.get("model", ""):
            raise TestbedError("host 1 was killed")
        self.write(Path(options["output"]))

    def write(self, path: Path) -> None:
        path.write_text("{}")


@pytest.mark.parametrize(("again_s", "kept_s"), [(1.1, 1.1), (1.4, 1.3)])
def test_what_ran_on_a_slow_machine_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again_s: float, kept_s: float
) -> None:
    """Bare compute took 1 s beside one line rate and 1.3 beside another: the calmer try stays."""

    def record(path: Path, seconds: float) -> None:
        compute = Measurement(kind="compute", variant="gemm alone", samples_s=(seconds,) * 3)
        rounds = made_up([])
        record = Record(
            environment=rounds.environment, layout=rounds.layout, measurements=(compute,)
        )
        save_json(record, path)

    record(tmp_path / "record-1gbit-2hosts.json", 1.0)
    record(tmp_path / "record-3gbit-2hosts.json", 1.3)
    monkeypatch.setattr("measure_campaign.Testbed", _Testbed)
    monkeypatch.setattr(_Testbed, "write", lambda _, path: record(path, again_s))
    said: list[str] = []
    assert Campaign(tmp_path, fit_rates=(1.0, 3.0), again_above=1.2).run(said.append) == 0
    assert [line.split()[0] for line in said] == ["there", "there", "slower", "measured"]
    (kept,) = load_record(tmp_path / "record-3gbit-2hosts.json").measurements
    assert kept.samples_s[0] == kept_s
    assert len(list(tmp_path.iterdir())) == 2


def test_a_campaign_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("measure_campaign.Testbed", _Testbed)
    there = tmp_path / "rounds-transformer-2gbit-2hosts.json"
    there.write_text("kept")
    said: list[str] = []
    models = ("transformer", "cnn", "mine:make")
    assert Campaign(tmp_path, rates=(2.0,), models=models).run(said.append) == 1
    assert [line.split()[0] for line in said] == ["there", "FAILED", "measured"]
    assert "host 1 was killed" in said[1]
    assert there.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rounds-make-2gbit-2hosts.json",
        "rounds-transformer-2gbit-2hosts.json",
    ]
    assert campaign([str(tmp_path), "--rates", "2", "--models", "transformer"]) == 0
    assert "there" in capsys.readouterr().out


def test_a_campaign_measures_all_once_before_it_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("measure_campaign.Testbed", _Testbed)
    options = ["--rates", "2,5", "--models", "mixer,transformer", "--runs", "2"]
    assert campaign([str(tmp_path), *options]) == 0
    measured = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    once = [f"rounds-{m}-{r}gbit-2hosts" for r in (2, 5) for m in ("mixer", "transformer")]
    assert measured == [f"{name}{run}.json" for run in ("", ".run2") for name in once]


def test_a_campaign_of_strategies_records_what_they_send_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("measure_campaign.Testbed", _Testbed)
    monkeypatch.setattr(_Testbed, "write", lambda _, path: path.write_text(path.stem))
    asked: list[dict[str, Any]] = []
    run = _Testbed.run

    def kept(self: _Testbed, commands: list[list[str]], *others: Any) -> None:
        asked.append(json.loads(commands[0][-1]))
        run(self, commands, *others)

    monkeypatch.setattr(_Testbed, "run", kept)
    options = ["--strategies", "--fit-rates", "2,5", "--rates", "2", "--models", "mixer"]
    assert campaign([str(tmp_path), *options]) == 0
    *records, rounds = asked
    kinds = [kind for record in records for kind in record["only"]]
    assert len(records) == 7
    assert kinds.count("ddp_hook") == 1  # it sends nothing
    assert kinds.count("all_gather") == kinds.count("compute") == 2
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "compute"} <= set(kinds)
    strategies = [variant["strategy"] for variant in rounds["variants"]]
    wanted = {"ddp", "naive", "naive_flat", "per_parameter", "zero1", "fully_shard"}
    assert set(strategies) == wanted
    assert len(list(tmp_path.iterdir())) == 8
