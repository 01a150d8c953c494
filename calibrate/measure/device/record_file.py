"""The file of a device record: begun or resumed, and kept whole after every measurement."""

from __future__ import annotations

from pathlib import Path

import torch

from calibrate.files import save_json
from calibrate.measure.cluster.record_file import is_free
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import check_same_environment, device_environment
from calibrate.measure.host.machine import free_memory_bytes
from calibrate.records.device_record import SCHEMA, DeviceRecord, load_device_record

__all__ = ["DeviceRecordFile"]

_USUAL_BYTES = 4 * 2**30  # assumed of a CPU that does not tell


class DeviceRecordFile:
    """A record's file on one device; `allocator` says what becomes of memory that is freed."""

    def __init__(self, path: Path, device: torch.device, allocator: str, *, resume: bool) -> None:
        self._path, self._device, self._resume = path, device, resume
        self._allocator = allocator

    @property
    def kept(self) -> str:
        """What a user is told where the work ends early."""
        return f"What was measured is in {self._path}; the same command with --resume goes on"

    def first_record(self) -> DeviceRecord:
        """An empty record, or the one to resume, written; raises MeasureError."""
        record = self._begun()
        self.save(record)
        return record

    def _begun(self) -> DeviceRecord:
        fresh, path = self._fresh(), self._path
        if is_free(path, SCHEMA, resume=self._resume):
            return fresh
        old = load_device_record(path)
        check_same_environment(old.environment, fresh.environment, path, here="this machine")
        return old.model_copy(update={"skipped": {}})

    def _fresh(self) -> DeviceRecord:
        here = device_environment(self._device, self._allocator)
        if self._device.type != "cuda":
            free = free_memory_bytes() or _USUAL_BYTES
            return DeviceRecord(environment=here, memory_bytes=free)
        memory = torch.cuda.get_device_properties(self._device).total_memory
        told_of = None if torch.version.hip else torch.cuda.get_device_capability(self._device)
        return DeviceRecord(environment=here, memory_bytes=int(memory), capability=told_of)

    def save(self, record: DeviceRecord) -> None:
        """Write the record whole; raises MeasureError where that fails."""
        try:
            save_json(record, self._path)
        except OSError as error:
            raise MeasureError(
                f"{self._path} cannot be written: {error.strerror}. Its last whole version is as "
                "it was; mend that, and go on with --resume"
            ) from None
