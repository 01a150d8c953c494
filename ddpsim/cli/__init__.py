"""The command line: `app` starts and ends it, the other modules hold its commands."""

# their order is that of --help
# isort: off
from ddpsim.cli import run
from ddpsim.cli import diagnose
from ddpsim.cli import replay
from ddpsim.cli import sweep
from ddpsim.cli import plan
from ddpsim.cli import files
from ddpsim.cli import import_files
from ddpsim.cli import show
from ddpsim.cli.app import app, main, new_app, parsed, run_app

__all__ = [
    "app",
    "diagnose",
    "files",
    "import_files",
    "main",
    "new_app",
    "parsed",
    "plan",
    "replay",
    "run",
    "run_app",
    "show",
    "sweep",
]
