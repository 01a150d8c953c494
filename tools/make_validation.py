"""Hold predictions against published and recorded measurements; write what comes of it.

docs/validation.md, from the template beside this file; and
tests/data/campaigns/reports.tar.xz, every case of the recorded campaigns.

    DDPSIM_REFERENCE_DATA=... python tools/make_validation.py [page]

The figures that do not need the reference data (all but the rows with a V100 log) come from
tests/data and scenarios/testbed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import campaigns
from validation.folders import PAGE
from validation.page import page
from validation.recorded import (
    BLIND,
    CAMPAIGNS,
    LATER,
    SHARDED,
    STRATEGIES,
    UNSEEN,
    later_predicted,
    predicted,
    report_of,
)

_PAGE_ALONE = "page"


def main() -> None:
    """Write the campaigns' reports, and the page."""
    folders = [*CAMPAIGNS, STRATEGIES, SHARDED, UNSEEN, BLIND]
    reports = {report_of(folder).name: predicted(folder) for folder in folders}
    reports[LATER.name] = later_predicted()
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports.items():
            text = report.model_dump_json(by_alias=True, indent=1)
            (Path(folder) / name).write_text(text + "\n", encoding="utf-8")
        campaigns.pack_reports(Path(folder))
    # this process unpacked the campaigns as they were before
    subprocess.run([sys.executable, __file__, _PAGE_ALONE], check=True)  # noqa: S603


if __name__ == "__main__":
    if sys.argv[1:] == [_PAGE_ALONE]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        main()
