"""Hold predictions against published and recorded measurements; write what comes of it.

docs/validation.md, from the template beside this file; and
tests/data/campaigns/reports.tar.xz, every case of the recorded campaigns.

    DDPSIM_REFERENCE_DATA=... python tools/make_validation.py

The figures that do not need the reference data (all but the rows with a V100 log) come from
tests/data and scenarios/testbed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import campaigns
from validation.folders import PAGE
from validation.page import page
from validation.recorded import (
    CAMPAIGNS,
    LATER,
    SHARDED,
    STRATEGIES,
    UNSEEN,
    later_predicted,
    predicted,
    report_of,
)


def main() -> None:
    """Write the campaigns' reports, and the page."""
    folders = [*CAMPAIGNS, STRATEGIES, SHARDED, UNSEEN]
    reports = {report_of(folder).name: predicted(folder) for folder in folders}
    reports[LATER.name] = later_predicted()
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports.items():
            text = report.model_dump_json(by_alias=True, indent=1)
            (Path(folder) / name).write_text(text + "\n", encoding="utf-8")
        campaigns.pack_reports(Path(folder))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
