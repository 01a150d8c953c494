"""What NCCL says that it sends over: logs of jobs that ran with NCCL_DEBUG=INFO.

Source of the lines: nccl src/transport/p2p.cc, shm.cc, net.cc and src/misc/param.cc; logs in nccl
issues 226 (NCCL 2.4, which says Ring for Channel), 629, 1189 and 1814.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import lines_of, uncoloured
from ddpsim.scenario.quantity import SourceFile

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
_MOST = 2_000_000  # connections, and lines that tell of ranks: 300 MB
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
    log = debug_log(source.given, lines_of(source, _WANTED))
    if not log.connections:
        raise ImportFailedError(
            source.given, f"holds {LACKS_CONNECTIONS}; wanted {_WANTED}, from its beginning"
        )
    return log


def debug_log(name: str, log: Iterable[str]) -> DebugLog:
    """What the lines of a log called `name` say, which may tell of no connection."""
    connections: dict[Connection, None] = {}
    variables: dict[str, str] = {}
    hosts: dict[int, dict[int, str]] = defaultdict(dict)  # by size of a communicator and rank
    version, has_collectives, left = None, False, _MOST
    for line in log:
        if " via " not in line and "NCCL" not in line:
            continue
        text = uncoloured(line)
        connections |= dict.fromkeys(map(_connection, _CHANNEL.finditer(text)))
        variables |= {match["name"]: match["value"] for match in _SET.finditer(text)}
        for match in _RANK.finditer(text):
            hosts[int(match["ranks"])][int(match["rank"])] = match["host"]
            left -= 1
        version = version or _VERSION.search(text)
        has_collectives = has_collectives or " opCount " in text
        if len(connections) + len(variables) > left:
            raise ImportFailedError(name, "tells of more than 2 million connections and ranks")
    return DebugLog(
        *(name, tuple(connections), variables, _layout(hosts)),
        version=version and version["version"],
        has_collectives=has_collectives,
        ranks=max(hosts, default=None),
    )


def _layout(hosts: Mapping[int, Mapping[int, str]]) -> tuple[int, int] | None:
    """Hosts of the largest communicator and its ranks on each; None where these are not known."""
    size = max(hosts, default=0)
    on_host = Counter(hosts[size].values()) if size else Counter[str]()
    if not size or on_host.total() != size or len(set(on_host.values())) != 1:
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
