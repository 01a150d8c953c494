"""A restart and checkpoints of a model, in a job of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from calibrate.measure.errors import MeasureError

pytest.importorskip("torch", reason="torch is not installed: nothing can be measured")


def test_a_restart_is_measured_and_leaves_nothing(
    alone: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from calibrate.measure.model.restart import RestartOptions, measure_restart

    options = RestartOptions(model="measure_helpers:two_layers", path=tmp_path, batch=8)
    measure_restart(options)
    said = capfd.readouterr().out
    assert [line.partition("  ")[0] for line in said.splitlines()[:7]] == [
        *("process group", "first step", "ready", "checkpoint"),
        *("synchronous", "asynchronous", "load"),
    ]
    settings = YAML(typ="safe").load("\n".join(said.splitlines()[-2:]))
    assert settings["reliability"]["init_per_rank"] == "0 s"
    assert settings["workload"]["checkpoint_write"]["bandwidth"].endswith("B/s")
    assert list(tmp_path.iterdir()) == []
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(MeasureError, match="cannot be made: Not a directory; name another folder"):
        measure_restart(options.model_copy(update={"path": blocked}))
