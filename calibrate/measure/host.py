"""What this machine's small files say; nothing where they cannot be read."""

from __future__ import annotations

from pathlib import Path

__all__ = ["congestion_control", "free_memory_bytes", "text_of"]


def text_of(path: Path) -> str:
    """A small file's text without the space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def congestion_control(root: Path = Path("/")) -> str:
    """How TCP decides what to send here: "cubic", "bbr", ...; empty where it is not told."""
    return text_of(root / "proc/sys/net/ipv4/tcp_congestion_control")


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that new processes can have, in bytes; None where it is not told."""
    for line in text_of(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return None
