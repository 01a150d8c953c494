"""What the testbed raises for a reason a user can mend.

DdpsimError
└── TestbedError        the network cannot be built, used or removed: why, and what to do
    └── HostFailedError   a command on a host ended badly: which host, and the end of its stderr
"""

from __future__ import annotations

from calibrate.signals import name_of
from ddpsim.errors import DdpsimError

_LINES = 20  # of stderr in the message; the whole of it is in `stderr`


class TestbedError(DdpsimError):
    """The testbed cannot be built, used or removed."""

    __test__ = False  # pytest takes classes named Test... for tests


class HostFailedError(TestbedError):
    """The first host whose command failed: its number, exit code (-N: signal N) and stderr."""

    def __init__(self, host: int, code: int, stderr: str) -> None:
        self.host, self.code, self.stderr = host, code, stderr
        lines = stderr.rstrip().splitlines()
        cut = f", last {_LINES} of {len(lines)} lines" if len(lines) > _LINES else ""
        end = "\n".join(lines[-_LINES:])
        tail = f"; its stderr{cut}:\n{end}" if lines else "; it wrote nothing to stderr"
        super().__init__(f"host {host} {_how(code)}, the other hosts were stopped{tail}")


def _how(code: int) -> str:
    return f"was killed by {name_of(-code)}" if code < 0 else f"ended with exit code {code}"
