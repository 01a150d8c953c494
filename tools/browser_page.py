"""The live page for a site without a server: the simulator runs in the reader's browser.

    python tools/browser_page.py site/try

writes the page, Pyodide (npm's package) and the wheels that ddpsim needs (PyPI's) into one folder,
which any static server serves. It needs npm, pip and the network; the documentation builds without.
Where PyPI has no numpy for Pyodide, `--wheel numpy-....whl` of Pyodide's own distribution adds it.
Without numpy equal ranks are simulated, with intervals; ranks that differ, or of which a ring's
links set some apart, are not: the plain model does without it, but takes 14 s for one step of 32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpsim.explore.page import explore_page
from ddpsim.report.page.shell import packaged

ROOT = Path(__file__).resolve().parent.parent
PYODIDE = "314.0.7"
NEEDED = ("pydantic", "simpy", "ruamel.yaml")  # what answers a question imports no more of ours
OPTIONAL = ("numpy", "jinja2")  # unequal ranks, intervals; the report


def write(folder: Path, wheels: Sequence[Path] = ()) -> None:
    """Write the site into a folder; raises CalledProcessError where something is not to be had."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(explore_page("worker.js"), "utf-8")
    (folder / "worker.js").write_text(packaged("worker.js"), "utf-8")
    _pyodide(folder / "pyodide")
    held = folder / "wheels"
    shutil.rmtree(held, ignore_errors=True)
    held.mkdir()
    _pip("wheel", "--no-deps", "--wheel-dir", str(held), str(ROOT))
    lock = json.loads((folder / "pyodide" / "pyodide-lock.json").read_text("utf-8"))["info"]
    version = ".".join(lock["python"].split(".")[:2])
    wanted = ("--only-binary", ":all:", "--python-version", version, "--implementation", "cp")
    wanted += ("--abi", f"cp{version.replace('.', '')}", "--abi", "none", "--dest", str(held))
    wanted += ("--platform", f"pyemscripten_{lock['abi_version']}_wasm32", "--platform", "any")
    _pip("download", *wanted, *NEEDED)
    for wheel in wheels:
        shutil.copy(wheel, held)
    _markupsafe(held)
    for name in OPTIONAL:
        if not _has(name, wanted):
            print(f"left out: {name}, of which there is no wheel for Pyodide", file=sys.stderr)
    names = sorted(wheel.name for wheel in held.glob("*.whl"))
    (folder / "wheels.json").write_text(json.dumps(names), "utf-8")


def _pyodide(folder: Path) -> None:
    """The files of the npm package that a worker loads."""
    with TemporaryDirectory() as name:
        pack = ["npm", "pack", f"pyodide@{PYODIDE}", "--pack-destination", name]
        subprocess.run(pack, check=True, capture_output=True)  # noqa: S603 -- of our own
        (archive,) = Path(name).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(name, filter="data")
        folder.mkdir(exist_ok=True)
        for pattern in ("pyodide.mjs", "pyodide.asm.*", "python_stdlib.zip", "pyodide-lock.json"):
            for file in Path(name, "package").glob(pattern):
                shutil.copy(file, folder)


def _markupsafe(folder: Path) -> None:
    """What jinja2 needs: PyPI has no wheel of it for Pyodide, but it does without its C code."""
    options = ("--no-deps", "--no-cache-dir", "--no-binary", "markupsafe")
    with suppress(subprocess.CalledProcessError):
        _pip("wheel", *options, "--wheel-dir", str(folder), "markupsafe", CC="false")


def _has(name: str, wanted: Sequence[str]) -> bool:
    """Whether there is a wheel, which then lies among the others."""
    try:
        _pip("download", *wanted, "--find-links", wanted[wanted.index("--dest") + 1], name)
    except subprocess.CalledProcessError:
        return False
    return True


def _pip(*arguments: str, **environment: str) -> None:
    quiet = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    around = os.environ | environment
    subprocess.run(quiet, check=True, capture_output=True, env=around)  # noqa: S603 -- of our own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    given = parser.parse_args()
    write(given.folder, given.wheel)
