"""The file of a record in a job: begun or resumed, and kept whole after every measurement."""

from __future__ import annotations

import errno
from pathlib import Path

from pydantic import BaseModel

from calibrate.files import check_outputs, save_json
from calibrate.measure.cluster.plan import Options
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import check_same_machine, environment, rank_facts
from calibrate.measure.ranks.job import Job
from calibrate.records.record import SCHEMA, Record, load_record

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    """The file as rank 0 writes it; the other ranks hear whether it could."""

    def __init__(self, job: Job, options: Options) -> None:
        self._job, self._options = job, options

    def first_record(self) -> Record:
        """An empty record, or the one to resume, as rank 0 has it."""

        def begun() -> Record:
            try:
                record = self._load()
            except OSError as error:
                raise _unwritten(self._options.output, error) from None
            write_record(record, self._options.output)
            return record

        return self._job.first_does(begun)

    def _load(self) -> Record:
        path, job = self._options.output, self._job
        layout = job.place.layout.model_copy(
            update={"line_rate_bytes_per_s": self._options.line_rate_bytes_per_s}
        )
        fresh = Record(environment=environment(job, rank_facts(job)), layout=layout)
        if is_free(path, SCHEMA, resume=self._options.resume):
            return fresh
        old = load_record(path)
        check_same_machine(old, fresh, path)
        details = {k: v for k, v in old.environment.details.items() if k != "skipped"}
        here = old.environment.model_copy(update={"details": details})
        rate = fresh.layout.line_rate_bytes_per_s or old.layout.line_rate_bytes_per_s
        layout = old.layout.model_copy(update={"line_rate_bytes_per_s": rate})
        return old.model_copy(update={"environment": here, "layout": layout})

    def save(self, record: Record) -> None:
        """Write the record; raises MeasureError on every rank where rank 0 cannot."""
        self._job.first_does(lambda: write_record(record, self._options.output))


def write_record(record: BaseModel, path: Path) -> None:
    """Write a record whole; raises MeasureError, which says what to do."""
    try:
        save_json(record, path)
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> MeasureError:
    """Why a record cannot be written, and what to do."""
    is_full = error.errno in _NO_ROOM
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
    begin = f"{path} cannot be written: {reason}"
    if not _is_there(path):
        return MeasureError(f"{begin}: {'make room, or ' * is_full}name another file")
    mend = "make room" if is_full else "mend that"
    return MeasureError(
        f"{begin}. Its last whole version is as it was; {mend} and go on with --resume"
    )


def is_free(path: Path, schema: str, *, resume: bool) -> bool:
    """Whether a record begins anew; raises DdpsimError where what is there forbids it."""
    if not path.exists():
        return True
    if not path.is_dir() and not path.is_file():
        raise MeasureError(f"{path} is a device or a pipe, which keeps no record: name a file")
    if not resume or path.is_dir():
        check_outputs([(path, schema)])
    if not path.stat().st_size:
        return True
    if not resume:
        raise MeasureError(
            f"{path} is there already: go on from it with --resume, or name another file"
        )
    return False


def _is_there(path: Path) -> bool:
    """Whether a file is, as far as can be told."""
    try:
        return path.is_file()
    except OSError:
        return False
