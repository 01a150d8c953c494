"""One module opens what users name and parses JSON; all others that open something are listed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENS = {"open", "read_text", "read_bytes", "load", "loads", "fdopen", "fromfile", "genfromtxt"}
MODULES = {"json", "pickle", "gzip", "os", "np", "yaml", "marshal", "shelve", "io", "zipfile"}
ALLOWED = {
    "ddpsim/files.py": "the module that opens foreign files",
    "ddpsim/cli/explore.py": "its page, in a browser",
    "ddpsim/cli/start.py": "/dev/null, in place of a closed stream",
    "ddpsim/planning/sweeps/journal.py": "its own file, which it has made or knows by its header",
    "ddpsim/report/page/shell.py": "templates of the package",
    "ddpsim/scenario/catalog.py": "tables of the package",
    "ddpsim/scenario/starters.py": "scenarios of the package",
    "calibrate/measure/device/session.py": "a trace that it has just recorded",
    "calibrate/measure/host/machine.py": "/proc and /sys",
    "calibrate/measure/ranks/launch.py": "logs of the ranks that it has started",
    "calibrate/testbed/network.py": "what ip prints",
    "calibrate/testbed/shaping.py": "/proc",
    "calibrate/testbed/state.py": "its own state, and /proc",
}


def opens_or_parses(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            return True
        if isinstance(called, ast.Attribute) and called.attr in OPENS:
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            is_ours = owner == "text"  # ddpsim.importers.text
            if owner in MODULES or (called.attr not in ("load", "loads") and not is_ours):
                return True
    return False


def test_no_other_module_opens_files_or_parses_json() -> None:
    modules = [path for room in ("ddpsim", "calibrate") for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in modules if opens_or_parses(path)}
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == []
