"""The commands that developers use, in the environment that the README makes.

`lowest` and `wheel` make environments of their own.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import nox

# rooms whose tests need neither torch nor the source tree, and the tools that they do need
ROOMS = [f"tests/{room}" for room in ("scenario", "cluster", "engine", "planning", "report", "cli")]
TOOLS = ("pytest>=8", "hypothesis>=6.100", "pint>=0.24", "jsonschema>=4")

nox.options.default_venv_backend = "none"
nox.options.sessions = ["quick", "lint"]


@nox.session
def test(session: nox.Session) -> None:
    """All tests, on two cores."""
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session
def quick(session: nox.Session) -> None:
    """The tests of the simulator alone, without those that run torch or refit sweeps."""
    rooms = [f"tests/{room}" for room in ("scenario", "workload", "cluster", "engine")]
    rooms += ["tests/strategies", "tests/prediction/test_simulate.py"]
    apart = ("*_oracle", "compiled", "muon", "checkpointing", "memory_budget", "published_sweeps")
    apart += ("equivalence_of_strategies",)
    left_out = [f"--ignore-glob=*/test_{name}.py" for name in apart]
    shared = ("-n", "2", "--dist", "loadfile", *left_out)
    session.run("python", "-m", "pytest", *shared, *(session.posargs or rooms))


@nox.session
def explore(session: nox.Session) -> None:
    """Property tests with 20 times the examples, drawn anew; `nox -s explore -- tests/engine`."""
    paths = session.posargs or ["tests"]
    session.run("python", "-m", "pytest", "-n", "2", "--explore", "20", *paths)


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
def fuzz(session: nox.Session) -> None:
    """Each reader for three minutes, and 2,000 scenarios; needs the extra `fuzz`."""
    found = Path("build/fuzz/found")
    found.mkdir(parents=True, exist_ok=True)
    for reader in ("import", "kineto", "chakra"):
        limits = ("-max_total_time=180", "-rss_limit_mb=3000", f"-artifact_prefix={found}/")
        session.run("python", "tools/fuzzing/readers.py", reader, f"build/fuzz/{reader}", *limits)
    session.run("python", "tools/fuzzing/scenarios.py", "2000", *session.posargs)


@nox.session(venv_backend="uv|virtualenv")
def audit(session: nox.Session) -> None:
    """Known faults of ddpsim's requirements, as PyPI lists them."""
    session.install(".", "pip-audit")
    session.run("pip-audit", "--local", "--skip-editable")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, in `site`; a link that leads nowhere fails."""
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """The live page without a server, in `site/try`, and axe-core's findings on our pages.

    It needs npm, pip and Chromium.
    """
    session.run("python", "tools/browser_page.py", "site/try", *session.posargs)
    folder = Path(session.create_tmp()).resolve()
    session.run("npm", "pack", "axe-core@4.14.1", "--pack-destination", str(folder))
    with tarfile.open(folder / "axe-core-4.14.1.tgz") as packed:
        packed.extract("package/axe.min.js", folder, filter="data")
    found = {
        "DDPSIM_BROWSER_PAGE": str(Path("site/try").resolve()),
        "DDPSIM_AXE": str(folder / "package" / "axe.min.js"),
    }
    tests = [f"tests/explore/test_{name}.py" for name in ("without_server", "accessibility")]
    session.run("python", "-m", "pytest", *tests, env=found)


@nox.session
def validation(session: nox.Session) -> None:
    """Predict every recorded campaign anew and write the validation pages."""
    session.run("python", "tools/make_validation.py")


@nox.session(python="3.10", venv_backend="uv|virtualenv")
def lowest(session: nox.Session) -> None:
    """The tests of the simulator with the lowest versions that pyproject.toml allows."""
    extras = ".[dask,parquet,report,tune]"
    session.install("-c", "constraints-lowest.txt", extras, "scipy", *TOOLS)
    session.run("python", "-m", "pytest", *ROOMS, *session.posargs)


@nox.session(python=["3.10", "3.13"], venv_backend="uv|virtualenv")
def wheel(session: nox.Session) -> None:
    """The sdist's tests against the wheel made from it, outside the repository."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "dist", ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"))
    (built,) = (folder / "dist").glob("*.whl")
    tree = _unpacked_without_code(folder / "dist")
    session.install(f"{built}[report,tune]", "scipy", *TOOLS)
    session.chdir(tree)
    session.run("python", "-m", "pytest", *ROOMS, *session.posargs)


def _unpacked_without_code(folder: Path) -> Path:
    """The sdist in `folder`, unpacked, without the packages: tests then find the installed ones."""
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    for package in ("ddpsim", "calibrate"):
        shutil.rmtree(tree / package)
    return tree
