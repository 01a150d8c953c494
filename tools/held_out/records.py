"""Records of GPUs that `calibrate device` measured: `tests/data/devices`."""

from __future__ import annotations

import gzip
import tempfile
from functools import cache
from pathlib import Path

from calibrate.records.device_record import DeviceRecord, load_device_record

__all__ = ["RECORDED", "record_of"]

FOLDER = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "devices"
RECORDED = ("h100-sxm-80gb", "h200-sxm-141gb")


@cache
def record_of(device: str) -> DeviceRecord:
    """What was measured on a GPU of this name."""
    packed = FOLDER / f"{device}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / packed.stem
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        return load_device_record(path)
