"""All commands of the command line, in the order of --help."""

# isort: off
from ddpsim.cli import run
from ddpsim.cli import diagnose
from ddpsim.cli import sweep
from ddpsim.cli import plan
from ddpsim.cli import explore
from ddpsim.cli import files
from ddpsim.cli import show
from ddpsim.cli.typer_app import app

__all__ = [
    "app",
    "diagnose",
    "explore",
    "files",
    "plan",
    "run",
    "show",
    "sweep",
]
