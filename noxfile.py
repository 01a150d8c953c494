"""The commands that developers use, in the environment that the README makes."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["quick", "lint"]


@nox.session
def test(session: nox.Session) -> None:
    """All tests, on two cores."""
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session
def quick(session: nox.Session) -> None:
    """The tests of the simulator alone, without measurements and recorded campaigns."""
    apart = ("measure", "rounds", "testbed", "validate", "validation", "page", "fit")
    left_out = [f"--ignore-glob=*/test_{name}.py" for name in apart]
    session.run("python", "-m", "pytest", "-n", "2", *left_out, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types and import contracts."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def bench(session: nox.Session) -> None:
    """Speed, as ratios to bare SimPy: add --benchmark-json=FILE to keep it."""
    session.run("python", "-m", "pytest", "benchmarks", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, in `site`; a link that leads nowhere fails."""
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def validation(session: nox.Session) -> None:
    """Predict every recorded campaign anew and write the validation pages."""
    session.run("python", "tools/make_validation.py")
