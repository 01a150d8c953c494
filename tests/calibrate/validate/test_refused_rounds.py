"""Rounds that cannot be held against a profile, and why."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from measured.made_rounds import BACKWARD, ONE, TWO, Measured, made_up, write_rounds

from calibrate.fit.profile import fit_logs
from calibrate.records.rounds import save_rounds
from calibrate.records.variant import Variant
from calibrate.validate.summary import summary
from calibrate.validate.validate import validate
from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog


def test_too_few_rounds_are_refused(tmp_path: Path) -> None:
    rounds = made_up([ONE])
    variant = rounds.variants[0]
    parts = ("whole_s", "forward_s", "backward_s", "optimizer_s")
    logged = {name: samples[:2] for name, samples in variant.logged}
    two = {part: getattr(variant, part)[:2] for part in parts}
    short = variant.model_copy(update=two | {"logged": variant.logged.model_copy(update=logged)})
    save_rounds(rounds.model_copy(update={"variants": (short,)}), tmp_path / "two.json")
    with pytest.raises(DdpsimError, match=r"two\.json: 2 rounds tell nothing of the noise"):
        validate([tmp_path / "two.json"])


@pytest.mark.skipif(
    "DDPSIM_REFERENCE_DATA" not in os.environ, reason="DDPSIM_REFERENCE_DATA is not set"
)
def test_rounds_of_a_restless_machine_are_compared() -> None:
    """Its hypervisor stole time; other programs ran, so that rounds vary by a quarter."""
    folder = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "testbed" / "noisy"
    for path in sorted(folder.glob("*.json")):
        (sweep,) = validate([path]).sweeps
        *of_ddp, sharded = sweep.cases
        assert [case.variant for case in of_ddp] == ["default", "1", "0.25"]
        assert sharded.variant == "fully_shard with root"
        assert all(case.within_noise for case in of_ddp)
        assert sharded.measured.exposed is None


def test_a_variant_that_is_not_modelled_is_left_out(tmp_path: Path) -> None:
    """A log is of all ranks, and hsdp has groups of them; alone in its file it is an error."""
    hsdp = Measured(Variant(strategy="hsdp"), ONE.backward, ONE.exposed, ())
    rounds = made_up([ONE, hsdp])
    plain, unlogged = rounds.variants[0], rounds.variants[1].model_copy(update={"logged": None})
    path = tmp_path / "rounds.json"
    save_rounds(rounds.model_copy(update={"variants": (plain, unlogged)}), path)
    (sweep,) = validate([path]).sweeps
    assert [case.variant for case in sweep.cases] == ["100"]
    (told,) = sweep.warnings
    assert told.startswith("hsdp is not predicted: cluster.all_reduce: is of all ranks, and says")
    save_rounds(rounds.model_copy(update={"variants": (unlogged,)}), path)
    with pytest.raises(DdpsimError, match=r"rounds\.json cannot be simulated: cluster.all_reduce"):
        validate([path])


def test_a_profile_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = write_rounds(tmp_path, ONE)
    profile = tmp_path / "cluster.json"
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "another")
    elsewhere = fitted.provenance.model_copy(update={"machine": "another"})
    for update, message in (
        (
            {"provenance": elsewhere, "backend": "gloo"},
            "on 'm', but the profile cluster.json on 'a",
        ),
        ({"backend": "nccl"}, "with 'gloo', but the profile cluster.json with 'nccl': validate"),
    ):
        made = fitted.model_copy(update=update)
        profile.write_text(made.model_dump_json(by_alias=True), encoding="utf-8")
        with pytest.raises(DdpsimError, match=message):
            validate([path], profile)


def test_one_machine_by_two_names_is_one(tmp_path: Path) -> None:
    """A log leaves out what the driver says before a GPU's name."""
    rounds = made_up([ONE])
    told = rounds.environment.model_copy(update={"machine": "NVIDIA A100-SXM4-40GB"})
    save_rounds(rounds.model_copy(update={"environment": told}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m").model_copy(update={"backend": "gloo"})
    made = fitted.provenance.model_copy(update={"machine": "A100-SXM4-40GB"})
    profile = tmp_path / "cluster.json"
    text = fitted.model_copy(update={"provenance": made}).model_dump_json(by_alias=True)
    profile.write_text(text, encoding="utf-8")
    assert validate([tmp_path / "rounds.json"], profile).sweeps


def test_another_processor_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Where both are told: older files do not tell."""
    rounds = made_up([ONE])
    told = rounds.environment.model_copy(update={"details": {"processor": "model 2"}})
    save_rounds(rounds.model_copy(update={"environment": told}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m").model_copy(update={"backend": "gloo"})
    profile = tmp_path / "cluster.json"
    for processor in ("", "model 2", "model 3"):
        made = fitted.provenance.model_copy(update={"machine": "m", "processor": processor})
        text = fitted.model_copy(update={"provenance": made}).model_dump_json(by_alias=True)
        profile.write_text(text, encoding="utf-8")
        if processor != "model 3":
            assert validate([tmp_path / "rounds.json"], profile).sweeps
    said = (
        "rounds.json and the profile cluster.json were measured on machines that call themselves "
        "'m', but one is model 2 and the other model 3: validate each cluster against its own"
    )
    with pytest.raises(DdpsimError, match=said):
        validate([tmp_path / "rounds.json"], profile)


def test_rounds_over_links_of_which_nobody_knows_are_refused(tmp_path: Path) -> None:
    """Several kinds were measured: which of them are these?"""
    rounds = made_up([ONE])
    unknown = rounds.layout.model_copy(update={"line_rate_bytes_per_s": None})
    save_rounds(rounds.model_copy(update={"layout": unknown}), tmp_path / "rounds.json")
    logs = [AllReduceLog("log", "", 2, 1, tuple((2**i, 1e-4 + 2**i / 1e9) for i in range(10, 24)))]
    fitted = fit_logs(logs, "m")
    known = fitted.model_copy(
        update={
            "backend": "gloo",
            "valid": fitted.valid.model_copy(update={"line_rates_bytes_per_s": (1e8, 2e8)}),
        }
    )
    profile = tmp_path / "cluster.json"
    profile.write_text(known.model_dump_json(by_alias=True), encoding="utf-8")
    said = (
        "rounds.json does not say the line rate of its nodes' links, and the profile cluster.json "
    )
    with pytest.raises(DdpsimError, match=f"{said}was measured on 2 kinds of them"):
        validate([tmp_path / "rounds.json"], profile)


@pytest.mark.parametrize(
    ("place", "spoilt", "message"),
    [
        (("alone", "forward_s"), [], "alone.forward_s: has 0 rounds, wanted 9"),
        (("alone", "whole_s", 1), [0.1], "alone.whole_s: a round of 1 rank, but the layout has 2"),
        (("alone", "backward_s", 0), [0, 0.1], "alone.backward_s: 0 s is no time of an iteration"),
        (("alone", "optimizer_s", 0, 1), -1, "alone.optimizer_s: -1 s is no time"),
        (("alone", "hook_s"), [0.0], "alone.hook_s: of 1 rank, but the layout has 2"),
        (("parameters", 1, "ready_s"), [0.1] * 3, "parameters.1.ready_s: of 3 ranks"),
        (("variants", 1, "stolen_s"), [[0, 0]], "variants.1.stolen_s: has 1 round, wanted 9"),
        (("variants", 0, "logged", "comm_s", 2), [0.1] * 3, "logged.comm_s: a round of 3 ranks"),
        (("variants",), [], "variants: wanted one or more"),
        (("all_reduce", 0, "samples_s"), [], "samples_s: has 0 rounds, wanted one or more"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(
    tmp_path: Path, place: tuple[str | int, ...], spoilt: object, message: str
) -> None:
    path = write_rounds(tmp_path, TWO, ONE)
    document = json.loads(path.read_text())
    part, last = document, place[-1]
    for key in place[:-1]:
        part = part[key]
    part[last] = spoilt
    path.write_text(json.dumps(document))
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        validate([path])


def test_ready_times_beyond_the_backward_are_repaired(tmp_path: Path) -> None:
    """Nobody can measure the same again: they are shortened to it, with a warning."""
    rounds = made_up([TWO, ONE])
    late = rounds.parameters[0].model_copy(update={"ready_s": (2 * BACKWARD,) * 2})
    parameters = (late, *rounds.parameters[1:])
    save_rounds(rounds.model_copy(update={"parameters": parameters}), tmp_path / "late.json")
    (sweep,) = validate([tmp_path / "late.json"]).sweeps
    (told,) = sweep.warnings
    assert told.startswith("the last gradient is ready 100.0% after the backward has ended")
    assert len(sweep.cases) == 2


def test_files_that_cannot_be_used_are_left_out(tmp_path: Path) -> None:
    good, text = write_rounds(tmp_path, TWO, ONE), tmp_path / "notes.txt"
    copy = tmp_path / "copy.json"
    copy.write_bytes(good.read_bytes())
    text.write_text("no rounds")
    found = validate([text, good, copy, tmp_path / ".." / tmp_path.name / good.name])
    assert [sweep.file for sweep in found.sweeps] == ["rounds.json"]
    reasons = ("is no ddpsim.ddp-rounds/1", "hold the same rounds", "is named twice")
    assert len(found.left_out) == len(reasons)
    for why, reason in zip(found.left_out, reasons, strict=True):
        assert reason in why
        assert f"LEFT OUT {why}" in summary(found)
    with pytest.raises(DdpsimError, match=r"no file can be used:\n.*notes.txt: is no ddpsim"):
        validate([text, tmp_path / "none.json"])


def test_no_rounds_are_refused() -> None:
    with pytest.raises(DdpsimError, match="no rounds"):
        validate([])
