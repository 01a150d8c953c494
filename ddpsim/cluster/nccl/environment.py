"""NCCL's environment variables, as far as they change which way a collective takes.

Source: NVIDIA's NCCL user guide (Environment Variables) and nccl src/graph/tuning.cc and paths.cc,
v2.30.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpsim.cluster.nccl.tables import PROTOCOLS
from ddpsim.cluster.nccl.thresholds import LAST_WITHOUT_TUNER
from ddpsim.errors import shown
from ddpsim.scenario.cluster import NEWEST_NCCL as NEWEST

_ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "nvls", "nvlstree": "nvls", "pat": "pat"}
_PROTOCOLS = {protocol.lower(): protocol for protocol in PROTOCOLS}
_UNUSED = {"collnet", "collnetdirect", "collnetchain"}  # never what is taken here
_SWITCHES = (
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_NVLS_ENABLE", "NCCL_PAT_ENABLE", "NCCL_MNNVL_ENABLE"),
)
# how far apart GPUs may be for peer-to-peer, the nearest first; NCCL's old numbers of them
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
_WORDS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL")
_NUMBERS = (
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_BUFFSIZE",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_TREE_THRESHOLD",
)
# versions of NCCL 2 that read them, where not all do
_READ_FROM = {
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), 5),
    "NCCL_NVLS_ENABLE": 17,
    "NCCL_MNNVL_ENABLE": 20,
    "NCCL_PAT_ENABLE": 23,
}
_READ_TO = {"NCCL_TREE_THRESHOLD": LAST_WITHOUT_TUNER}


@dataclass(frozen=True)
class Environment:
    """What is set. `algorithms` and `protocols` are those allowed; empty: all.

    `sockets`: of a connection and channel; None: by NCCL's rule. `p2p_level`: one of LEVELS, up to
    which GPUs reach each other; None: by NCCL's rule.
    """

    algorithms: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    min_channels: int = 0
    max_channels: int = 0
    buffer_bytes: int = 0
    tree_threshold: int | None = None
    threads: int | None = None
    sockets: int | None = None
    uses_nvls: bool = True
    uses_pat: bool = True
    uses_mnnvl: bool = True
    p2p_level: str | None = None
    uses_shm: bool = True
    uses_ib: bool = True

    @property
    def uses_p2p(self) -> bool:
        """Whether GPUs joined by NVLink reach each other."""
        return self.p2p_level != "LOC"


def read_environment(variables: Mapping[str, str | int], minor: int = NEWEST) -> Environment:
    """What they mean in NCCL 2.`minor`.

    Raises ValueError with a variable's name and what it may be, and for one that this version does
    not read, as NCCL would say nothing of it.
    """
    for name in variables:
        first, last = _READ_FROM.get(name, 0), _READ_TO.get(name, NEWEST)
        if not first <= minor <= last:
            reads = f"NCCL 2.{first} and later do" if minor < first else f"NCCL 2.{last} does"
            raise ValueError(
                f"{name} is not read by NCCL 2.{minor} ({reads}); drop it, or set nccl"
            )
    for name in variables:
        if name not in (*_WORDS, *_SWITCHES, *_NUMBERS):
            names = ", ".join((*_WORDS, *_SWITCHES, *_NUMBERS))
            raise ValueError(f"{name} is not modelled; drop it (modelled are: {names})")
    numbers = {name: _number(name, variables[name]) for name in _NUMBERS if name in variables}
    switches = {name: _number(name, variables[name]) for name in _SWITCHES if name in variables}
    threads = numbers.get("NCCL_SOCKET_NTHREADS")
    each = numbers.get("NCCL_NSOCKS_PERTHREAD", 1)
    return Environment(
        algorithms=_allowed("NCCL_ALGO", variables.get("NCCL_ALGO"), _ALGORITHMS),
        protocols=_allowed("NCCL_PROTO", variables.get("NCCL_PROTO"), _PROTOCOLS),
        min_channels=numbers.get("NCCL_MIN_NCHANNELS", 0),
        max_channels=numbers.get("NCCL_MAX_NCHANNELS", 0),
        buffer_bytes=numbers.get("NCCL_BUFFSIZE", 0),
        tree_threshold=numbers.get("NCCL_TREE_THRESHOLD"),
        threads=threads,
        sockets=None if threads is None else max(1, threads) * max(1, each),
        uses_nvls=switches.get("NCCL_NVLS_ENABLE", 2) != 0,
        uses_pat=switches.get("NCCL_PAT_ENABLE", 2) != 0,
        uses_mnnvl=switches.get("NCCL_MNNVL_ENABLE", 2) != 0,
        p2p_level=_p2p_level(variables, is_off=switches.get("NCCL_P2P_DISABLE", 0) == 1),
        uses_shm=switches.get("NCCL_SHM_DISABLE", 0) != 1,
        uses_ib=switches.get("NCCL_IB_DISABLE", 0) != 1,
    )


def _p2p_level(variables: Mapping[str, str | int], *, is_off: bool) -> str | None:
    """The farthest GPUs that reach each other; NCCL_P2P_DISABLE goes before NCCL_P2P_LEVEL."""
    if is_off:
        return "LOC"
    written = variables.get("NCCL_P2P_LEVEL")
    if written is None:
        return None
    name = str(written)
    if name.isdecimal():
        return _OLD_LEVELS[min(int(name), len(_OLD_LEVELS) - 1)]
    if name not in LEVELS:
        choices = ", ".join(LEVELS)
        raise ValueError(f"NCCL_P2P_LEVEL: {shown(written)} is not known; write one of {choices}")
    return name


def _number(name: str, value: str | int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {shown(value)}") from None
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _allowed(name: str, value: str | int | None, words: Mapping[str, str]) -> tuple[str, ...]:
    """What all-reduces may take by `ring,tree`, `^tree` or `allreduce:ring;broadcast:ring`."""
    if value is None:
        return ()
    entries = [entry.split(":") for entry in str(value).lower().split(";") if entry]
    for_all = [entry[-1] for entry in entries if len(entry) == 1]
    for_all_reduces = [entry[-1] for entry in entries if entry[0].strip() == "allreduce"]
    if not (for_all_reduces or for_all):
        return ()
    written = (for_all_reduces or for_all)[-1].strip()
    names = [part.strip() for part in written.removeprefix("^").split(",") if part.strip()]
    unknown = [part for part in names if part not in words and part not in _UNUSED]
    if unknown or not names:
        choices = ", ".join(words)
        raise ValueError(f"{name}: {shown(value)} is not known; write some of {choices}")
    named = {words[part] for part in names if part in words}
    everything = dict.fromkeys(words.values())
    is_without = written.startswith("^")
    allowed = tuple(each for each in everything if (each in named) != is_without)
    if not any(each != "pat" for each in allowed):
        raise ValueError(f"{name}: {shown(value)} leaves nothing for an all-reduce")
    return allowed
