"""Answers that draw themselves: as a figure, and in notebooks as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpsim.report.notebook.figures import Figure


class Drawn:
    """An answer with a figure; `ddpsim.report.notebook.figures` says what each one shows."""

    __slots__ = ()

    def plot(self) -> Figure:
        """The answer as a plotly figure: parts of a step, steps of a sweep, changes, causes, days.

        >>> result = ddpsim.simulate(ddpsim.load_scenario("scenario.yaml"))
        >>> print(*(trace.name for trace in result.plot().data), sep=" | ")
        forward | backward | exposed comm | optimizer | other | step, 80% interval
        >>> grid = ddpsim.Grid.of(["ddp.bucket_cap_mb=1,25", "cluster.nodes=2,4"])
        >>> print(*(line.name for line in ddpsim.sweep("scenario.yaml", grid).plot().data))
        cluster.nodes=2 cluster.nodes=4
        """
        from ddpsim.report.notebook.figures import figure_of  # noqa: PLC0415 -- plotly is slow

        return figure_of(self)


class Tabled(Drawn):
    """An answer with a table too."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The answer as a notebook shows it: a table of HTML, of many points the best 40."""
        from ddpsim.report.notebook.tables import table_of  # noqa: PLC0415 -- a room above

        return table_of(self)
