"""The sdist builds a wheel, and the wheel works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from project_files import ROOT

pytest.importorskip("hatchling", reason="needs the extra test")
pytest.importorskip("hatch_vcs", reason="needs the extra test")

pytestmark = pytest.mark.slow


def _build(tree: Path, target: str, output: Path) -> Path:
    """Build one target of `tree` with the tools of this environment; its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return _build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what pip would put into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _version(built: Path) -> str:
    return built.name.removesuffix(".tar.gz").split("-")[1]


def test_the_sdist_holds_all_that_its_tests_read(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "tests", "scenarios", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    tracked = [name for name in listed if (ROOT / name).is_file()]
    assert {"pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "CITATION.cff"} <= names
    assert set(tracked) - names == set()


def test_the_wheel_has_the_version_of_its_sdist(sdist: Path, wheel: Path) -> None:
    assert _version(wheel) == _version(sdist)


def test_the_wheel_is_small_and_holds_the_packages_alone(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_850_000  # of which 400,000 are plotly's bundle, 150,000 the zoo
    names = ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"ddpsim", "calibrate", f"ddpsim-{_version(wheel)}.dist-info"}
    assert {"ddpsim/py.typed", "calibrate/py.typed", "ddpsim/data/devices.json"} <= set(names)
    scenarios = {path.name for path in (ROOT / "scenarios").glob("*.yaml")}
    packed = {Path(name).name for name in names if name.startswith("ddpsim/data/scenarios/")}
    assert scenarios <= packed


def test_the_wheel_works_without_the_repository(wheel: Path, installed: Path) -> None:
    def ddpsim(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "ddpsim", *arguments],
            cwd=installed,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert ddpsim("--version") == f"ddpsim {_version(wheel)}\n"
    scenario = installed / "scenario.yaml"
    scenario.write_text(ddpsim("init", "resnet50-2x8-25gbit"), encoding="utf-8")
    assert "16 ranks (2 x 8)" in ddpsim("run", str(scenario))
