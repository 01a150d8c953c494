"""Files of records: begun or resumed, and kept whole after every measurement."""

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


def first_record(job: Job, options: Options) -> Record:
    """An empty record, or the one to resume, as rank 0 has it, written.

    Raises MeasureError on every rank where rank 0 cannot.
    """

    def begun() -> Record:
        try:
            record = _load(job, options)
        except OSError as error:
            raise _unwritten(options.output, error) from None
        write_record(record, options.output)
        return record

    return job.first_does(begun)


def _load(job: Job, options: Options) -> Record:
    path, rate = options.output, options.line_rate_bytes_per_s
    layout = job.place.layout.model_copy(update={"line_rate_bytes_per_s": rate})
    fresh = Record(environment=environment(job, rank_facts(job)), layout=layout)
    if is_free(path, SCHEMA, resume=options.resume):
        return fresh
    old = load_record(path)
    check_same_machine(old, fresh, path)
    details = {k: v for k, v in old.environment.details.items() if k != "skipped"}
    here = old.environment.model_copy(update={"details": details})
    rates = {"line_rate_bytes_per_s": rate or old.layout.line_rate_bytes_per_s}
    layout = old.layout.model_copy(update=rates)
    return old.model_copy(update={"environment": here, "layout": layout})


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
    try:
        is_there = path.is_file()
    except OSError:
        is_there = False
    if not is_there:
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
