"""What NCCL says that it sends over: logs of jobs that ran with NCCL_DEBUG=INFO.

Source of the lines: nccl src/transport/p2p.cc, shm.cc, net.cc and src/misc/param.cc; logs in nccl
issues 226 (NCCL 2.4, which says Ring for Channel), 629, 1189 and 1814.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import read_text, uncoloured
from ddpsim.scenario.quantity import SourceFile

__all__ = ["LACKS_CONNECTIONS", "Connection", "DebugLog", "debug_log", "read_debug_log"]

LACKS_CONNECTIONS = "no line of NCCL such as 'Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM'"

_WANTED = "the output of a job that ran with NCCL_DEBUG=INFO"
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<sender>\d{1,7})(?:\[\w+\])? -> "
    r"(?P<receiver>\d{1,7})(?:\[\w+\])?(?: \[(?:send|receive)\])? "
    r"via (?P<way>[\w-]+)(?:/(?P<kind>[^/\n]+))?(?P<rest>[^\n]*)"
)
_NIC = re.compile(r"/(\d{1,4})(?:$|[/(\s])")
_RANK = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,253}):\d+:\d+ [^\n]{0,40}NCCL INFO [^\n]{0,200}?"
    r"rank (?P<rank>\d{1,7}) n[rR]anks (?P<ranks>\d{1,7})\b"
)
_VERSION = re.compile(r"NCCL version (?P<version>2\.\d{1,2}(?:\.\d{1,2})?)")
_SET = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>\w+)")


class Connection(NamedTuple):
    """One channel from a rank to another.

    `way` is P2P, SHM or NET; `kind` of a network its plugin, such as IB or Socket, and `nic` the
    number of the NIC; `is_direct`: by GPUDirect RDMA.
    """

    sender: int
    receiver: int
    way: str
    kind: str
    nic: int | None
    is_direct: bool


@dataclass(frozen=True)
class DebugLog:
    """The connections of a job, each once, and NCCL's variables that were set.

    `layout`: nodes and ranks of each, `version` of NCCL; None where the log does not tell.
    `ranks`: of the largest communicator. `has_collectives`: each of them has a line, which
    NCCL_DEBUG_SUBSYS=COLL asks for.
    """

    name: str
    connections: tuple[Connection, ...]
    variables: dict[str, str]
    layout: tuple[int, int] | None = None
    version: str | None = None
    has_collectives: bool = False
    ranks: int | None = None


def read_debug_log(source: SourceFile) -> DebugLog:
    """Read a log, whatever else stands in it; raises ImportFailedError where NCCL says nothing."""
    log = debug_log(source.given, read_text(source, _WANTED, of_many_programs=True))
    if not log.connections:
        raise ImportFailedError(
            source.given, f"holds {LACKS_CONNECTIONS}; wanted {_WANTED}, from its beginning"
        )
    return log


def debug_log(name: str, text: str) -> DebugLog:
    """What a text called `name` says, which may have no connection."""
    text = uncoloured(text)
    found = dict.fromkeys(_connection(match) for match in _CHANNEL.finditer(text))
    variables = {match["name"]: match["value"] for match in _SET.finditer(text)}
    version = _VERSION.search(text)
    return DebugLog(
        *(name, tuple(found), variables, _layout(text)),
        version=version and version["version"],
        has_collectives=": opCount " in text,
        ranks=max((int(match["ranks"]) for match in _RANK.finditer(text)), default=None),
    )


def _layout(text: str) -> tuple[int, int] | None:
    """Of the largest communicator, if it tells of all its ranks, as many on each host."""
    ranks: dict[int, dict[int, str]] = defaultdict(dict)
    for match in _RANK.finditer(text):
        ranks[int(match["ranks"])][int(match["rank"])] = match["host"]
    if not ranks:
        return None
    size = max(ranks)
    on_host = Counter(ranks[size].values())
    if len(ranks[size]) != size or len(set(on_host.values())) != 1:
        return None
    return len(on_host), size // len(on_host)


def _connection(match: re.Match[str]) -> Connection:
    way, rest = match["way"], match["rest"]
    if way == "direct":  # "direct shared memory", before NCCL 2.12
        way = "SHM"
    nic = _NIC.match(rest) if way == "NET" else None
    return Connection(
        int(match["sender"]),
        int(match["receiver"]),
        way,
        (match["kind"] or "").strip(),
        int(nic[1]) if nic else None,
        "GDRDMA" in rest,
    )
