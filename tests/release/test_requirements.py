"""Declared versions: lower bounds that are tested, the same everywhere."""

from __future__ import annotations

from collections import defaultdict

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from project_files import PROJECT, ROOT, extras, requirements

FOR_USERS = (None, "calibrate", "dask", "parquet", "report", "tune")


def _lowest(requirement: Requirement) -> str:
    (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    return lowest


def test_lowest_constraints_are_the_declared_lower_bounds() -> None:
    declared = {one.name: _lowest(one) for extra in FOR_USERS for one in requirements(extra)}
    lines = (ROOT / "constraints-lowest.txt").read_text("utf-8").splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {one.name: str(one.specifier) for one in constraints} == {
        name: f"=={version}" for name, version in declared.items()
    }
    assert len(constraints) == len(declared)


def test_a_package_has_one_bound_in_all_extras() -> None:
    bounds: defaultdict[str, set[str]] = defaultdict(set)
    for extra in [None, *extras()]:
        for one in requirements(extra):
            bounds[one.name].add(str(one.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_pinned_test_tools_satisfy_their_bounds() -> None:
    lines = (ROOT / "constraints-test.txt").read_text("utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    bounds = {one.name: one.specifier for one in requirements("test")}
    for one in pinned:
        (pin,) = one.specifier
        assert pin.operator == "=="
        assert pin.version in bounds[one.name]


def test_nox_installs_test_tools_by_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nox", reason="needs the extra test")
    monkeypatch.syspath_prepend(ROOT)
    import noxfile

    assert set(noxfile.TOOLS) <= set(PROJECT["optional-dependencies"]["test"])
    for room in noxfile.ROOMS:
        assert list((ROOT / room).rglob("test_*.py"))


def test_the_image_for_clusters_names_every_dependency() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n#", "")
    (line,) = (line for line in text.splitlines() if line.startswith("#   RUN pip install"))
    names = line.removeprefix("#   RUN pip install").partition("&&")[0].replace('"', "").split()
    installed = {one.name: one.specifier for one in map(Requirement, names)}
    needed = [*requirements(), *requirements("calibrate")]
    assert set(installed) == {one.name for one in needed} - {"torch"}
    for one in needed:
        upper = SpecifierSet(",".join(str(b) for b in one.specifier if b.operator == "<"))
        assert installed.get(one.name, upper) == upper
