"""Issue forms, the citation and the policies: well formed, and they name what exists."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from project_files import PROJECT, ROOT, yaml_file
from typer.main import get_command

from calibrate.cli import app as calibrate_app
from ddpsim.cli import app
from ddpsim.version import __version__

FORMS = [
    path
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.name != "config.yml"
]
TEXTS = [*FORMS, ROOT / "SECURITY.md", ROOT / ".github" / "pull_request_template.md"]


def _commands(application: Any) -> set[str]:
    return set(get_command(application).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_well_formed(path: Path) -> None:
    form = yaml_file(path)
    assert set(form) == {"name", "description", "title", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea"}
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("bug", {"scenario", "output", "version"}),
        ("wrong-prediction", {"measured", "scenario", "prediction", "log", "version"}),
        ("question", {"question"}),
    ],
)
def test_an_issue_form_requires_what_an_answer_needs(name: str, asked: set[str]) -> None:
    form = yaml_file(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    fields = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert asked <= {field["id"] for field in fields}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_named_commands_and_files_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert set(re.findall(r"`ddpsim ([a-z][\w-]*)", text)) <= _commands(app)
    assert set(re.findall(r"`ddpsim calibrate ([a-z][\w-]*)", text)) <= _commands(calibrate_app)
    for file in re.findall(r"\b([A-Z_]+\.md)\b", text):
        assert (ROOT / file).is_file()


def test_the_citation_has_what_the_format_requires() -> None:
    citation = yaml_file(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["message"]
    assert citation["title"].startswith("ddpsim")
    assert all(set(author) & {"name", "family-names"} for author in citation["authors"])
    assert citation["license"] == PROJECT["license"]


def test_the_citation_names_no_other_version() -> None:
    citation = yaml_file(ROOT / "CITATION.cff")
    assert citation.get("version", __version__) == __version__
    assert isinstance(citation.get("date-released", date.min), date)


def test_the_changelog_has_the_known_headings() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\] - (Unreleased|\d{4}-\d\d-\d\d)", r) for r in releases
    )
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert releases
