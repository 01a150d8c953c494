"""Steps of equal layers, of which only the first are evaluated (`ddpsim.engine.fast.layers`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.evaluator import Evaluator
from ddpsim.engine.fast.layers import Layers
from ddpsim.engine.fast.trials import TrialStep, TrialWork

_Part = TrialStep | TrialWork
_ALL = 2  # sorts of figures


class _Standing(NamedTuple):
    """The moments at which ranks stand after a layer.

    `figures`: all that later parts depend on, in ticks since `first_ns`, [trials, 1]: streams and
    what the layer refers to; then the rest, asked for where these stand as they did after the layer
    before. `counted`: how long ranks have waited in this step.
    """

    first_ns: Ticks
    figures: list[list[Ticks]]
    counted: Ticks

    def is_like(self, before: _Standing) -> bool:
        """Whether all stands as it did a layer before, but for one number of ticks."""
        return len(self.figures) == _ALL and self.stands_as(before)

    def stands_as(self, before: _Standing) -> bool:
        """Whether that holds of what was asked for last."""
        place = len(self.figures) - 1
        if place >= len(before.figures):
            return False
        ours, theirs = self.figures[place], before.figures[place]
        return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


class Layered(Evaluator):
    """An evaluator whose moments are [trials, ranks]. `_was_late`: a host's launch since then."""

    _was_late = False

    def _but_for_equal(self, parts: Sequence[_Part], runs: Sequence[Layers]) -> Iterator[_Part]:
        """The parts of a step, without those of layers whose ends are known by earlier ones."""
        place = 0
        for layers in runs:
            yield from parts[place : layers.begin]
            yield from self._first_of(parts, layers)
            place = layers.end
        yield from parts[place:]

    def _first_of(self, parts: Sequence[_Part], layers: Layers) -> Iterator[_Part]:
        before: _Standing | None = None
        for number in range(layers.times):
            begin, self._was_late = layers.begin + number * layers.length, False
            yield from parts[begin : begin + layers.length]
            after = self._after(layers, number, before)
            if before and after.is_like(before):
                by_ns = after.first_ns - before.first_ns
                late_ns = layers.host_ns - by_ns
                if not (late_ns.any() if self._was_late else (late_ns > 0).any()):
                    waited_ns = after.counted - before.counted
                    self._go_on(layers, number, by_ns, waited_ns)
                    return
            before = after

    def _after(self, layers: Layers, number: int, before: _Standing | None) -> _Standing:
        """After so many layers and this one."""
        first_ns = self._stream_ns[:, :1]
        found = _Standing(first_ns, [self._referred_to(layers, number)], self._counted())
        if before and found.stands_as(before):
            found.figures.append(self._to_come(layers))
        return found

    def _referred_to(self, layers: Layers, number: int) -> list[Ticks]:
        """Streams, and the last Records and ends of collectives."""
        last = layers.records_of(number).stop
        seen = [self._stream_ns]
        seen += [self._recorded_ns[i] for i in range(last - layers.recorded_back, last)]
        sent = self._sent[len(self._sent) - max(1, layers.sent_back) :]
        seen += [collective.ends_ns for _, collective in sent]
        return [ns - self._stream_ns[:, :1] for ns in seen]

    def _go_on(self, layers: Layers, number: int, by_ns: Ticks, waited_ns: Ticks) -> None:
        """All layers after this one, each as long as it was."""
        left = layers.times - 1 - number
        sent = self._sent[len(self._sent) - layers.sent :]
        for later in range(1, left + 1):
            for launched, collective in sent:
                self._remember(launched, collective.later(later * by_ns))
            for i in layers.records_of(number):
                moment_ns = self._recorded_ns[i] + later * by_ns
                self._recorded_ns[i + later * layers.recorded] = moment_ns
        self._stream_ns = self._stream_ns + left * by_ns
        self._put_off(layers, left * by_ns, left * waited_ns)

    @abstractmethod
    def _remember(self, launched: object, collective: object) -> None:
        """A collective of the step."""

    @abstractmethod
    def _counted(self) -> Ticks:
        """How long ranks have waited in this step, and been in collectives."""

    @abstractmethod
    def _to_come(self, layers: Layers) -> list[Ticks]:
        """All else that later parts depend on, in ticks since the first rank's stream."""

    @abstractmethod
    def _put_off(self, layers: Layers, by_ns: Ticks, waited_ns: Ticks) -> None:
        """All of that is so much later, and ranks have waited so much more."""
