"""The recorded campaigns: raw measurements of the testbed, packed under tests/data/campaigns.

    python tools/campaigns.py unpack FOLDER     # to look at them
    python tools/campaigns.py pack FOLDER       # what was measured or predicted anew
    python tools/campaigns.py add CAMPAIGN      # one folder, and CAMPAIGN.json beside it

An archive holds a campaign (a folder of records, rounds and the profile fitted to them);
`reports.tar.xz` holds what predicting each came to. Packing is deterministic.
"""

from __future__ import annotations

import getpass
import hashlib
import shutil
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["PACKED", "add", "pack", "pack_reports", "unpack", "unpacked"]

PACKED = Path(__file__).resolve().parent.parent / "tests" / "data" / "campaigns"
_REPORTS = "reports"


@cache
def unpacked() -> Path:
    """A folder with all campaigns as files, made once for each state of the archives."""
    digest = hashlib.sha256()
    for archive in sorted(PACKED.glob("*.tar.xz")):
        digest.update(archive.name.encode())
        digest.update(archive.read_bytes())
    name = f"ddpsim-campaigns-{getpass.getuser()}-{digest.hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.is_dir():
        made = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        unpack(made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            return made if not folder.is_dir() else folder
    return folder


def unpack(folder: Path) -> None:
    """Write every campaign and every report into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in sorted(PACKED.glob("*.tar.xz")):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")


def pack(folder: Path) -> None:
    """Write an archive for each campaign of a folder, and one for the reports."""
    for campaign in sorted(path for path in folder.iterdir() if path.is_dir()):
        _write(campaign.name, folder, sorted(campaign.iterdir()))
    pack_reports(folder)


def add(campaign: Path) -> None:
    """Write the archive of one campaign, and its report among those of the others."""
    _write(campaign.name, campaign.parent, sorted(campaign.iterdir()))
    report = campaign.with_suffix(".json")
    if report.exists():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(_archive(_REPORTS)) as packed:
            packed.extractall(folder, filter="data")
            shutil.copy(report, folder)
            pack_reports(Path(folder))


def pack_reports(folder: Path) -> None:
    """Write the archive of the reports, the JSON files of a folder."""
    _write(_REPORTS, folder, sorted(folder.glob("*.json")))


def _archive(name: str) -> Path:
    return PACKED / f"{name}.tar.xz"


def _write(name: str, folder: Path, files: list[Path]) -> None:
    target = _archive(name)
    made = target.with_suffix(".part")
    with tarfile.open(made, "w:xz", preset=9) as packed:
        for file in files:
            packed.add(file, str(file.relative_to(folder)), filter=_without_owner)
    made.replace(target)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack, "add": add}[sys.argv[1]](Path(sys.argv[2]))
