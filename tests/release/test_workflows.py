"""GitHub's workflows name sessions, extras and files that exist; releases need no stored token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from project_files import PROJECT, ROOT, extras, yaml_file

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NAMES = [path.stem for path in WORKFLOWS]
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=NAMES)


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml_file(path)["jobs"].values():
        yield from job["steps"]


def _commands(path: Path) -> str:
    return "\n".join(step["run"] for step in _steps(path) if "run" in step)


def test_the_workflows_are_there() -> None:
    assert NAMES == ["ci", "nightly", "release", "weekly"]


@each_workflow
def test_a_workflow_has_limits_and_steps(path: Path) -> None:
    workflow = yaml_file(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        assert 0 < job["timeout-minutes"] <= 90
    for step in _steps(path):
        assert ("run" in step) != ("uses" in step), step


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "action.yml"], ids=[*NAMES, "action"])
def test_actions_are_pinned_by_commit(path: Path) -> None:
    """With the version beside it, for those who read and for those who update."""
    used = re.findall(r"uses: (.*)", path.read_text("utf-8"))
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert [name for name in used if not pinned.fullmatch(name)] == []


def test_images_are_pinned_by_digest_and_run_as_a_user_of_their_own() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    images = [line for line in lines if line.startswith("FROM ")]
    assert [line for line in images if not re.search(r"@sha256:[0-9a-f]{64}\b", line)] == []
    assert "USER ddpsim" in lines[lines.index(images[-1]) :]


@each_workflow
def test_named_sessions_extras_and_files_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("nox.registry", reason="needs the extra test")
    monkeypatch.syspath_prepend(ROOT)
    import noxfile

    assert noxfile.ROOMS  # its import registers the sessions
    commands = _commands(path)
    sessions = set(re.findall(r"nox -s (\S+)", commands))
    assert sessions
    assert sessions <= set(registry.get())
    named = {name for group in re.findall(r"\.\[([\w,]+)\]", commands) for name in group.split(",")}
    assert named <= set(extras())
    for file in re.findall(r" -c (\S+)", commands):
        assert (ROOT / file).is_file()


def test_tests_run_from_the_oldest_python() -> None:
    workflow = yaml_file(ROOT / ".github" / "workflows" / "ci.yml")
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    supported = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(8, 15)]
    assert pythons == [version for version in minors if version in supported]


def test_a_tag_publishes_without_a_token() -> None:
    path = ROOT / ".github" / "workflows" / "release.yml"
    workflow = yaml_file(path)
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in path.read_text("utf-8")
