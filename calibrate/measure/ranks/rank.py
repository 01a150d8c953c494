"""A process that is one rank of a job started here: its options, its last words, its exit code."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn

from calibrate.measure.errors import LostContactError
from ddpsim.errors import DdpsimError

__all__ = ["ENDS_WITH_STARTER", "FAILED", "LOST", "run_rank"]

ENDS_WITH_STARTER = "ends-with-starter"  # argument of a rank whose standard input is held open

# exit codes of a rank whose error is the last line that it wrote; the second if others are to blame
FAILED, LOST = 3, 4


def run_rank(task: Callable[[str], object]) -> NoReturn:
    """Do the task, with its options as JSON from the first argument, and end this process.

    ENDS_WITH_STARTER as the second argument ends it too, once its standard input is closed.
    """
    code = 0
    if sys.argv[2:] == [ENDS_WITH_STARTER]:
        threading.Thread(target=_end_with_starter, daemon=True).start()
    if isinstance(sys.stdout, TextIOWrapper):  # a file's name may be what its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        task(sys.argv[1])
    except DdpsimError as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        code = LOST if isinstance(error, LostContactError) else FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # no clean-up by gloo's threads: they may wait for a dead peer, and what counts is written
    os._exit(code)


def _end_with_starter() -> None:
    """End this process when the one that started it has ended, which holds standard input open."""
    while os.read(0, 1):
        pass
    os._exit(LOST)
