"""The batches of a data loader, by a clock of integers or of many lanes at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ddpsim.engine.program import Loader


class Batches:
    """A loader makes one batch after the other, and pauses while `capacity` of them wait.

    Without a loader a batch comes when it is asked for. Moments are integers, or arrays with
    `latest` numpy.maximum, each of its own loader of the same capacity.
    """

    def __init__(self, loader: Loader | None, latest: Callable[[Any, Any], Any] = max) -> None:
        self._loader = loader
        self._latest = latest
        self._made_ns: Any = 0
        self._taken_ns: deque[Any] = deque(maxlen=loader.capacity if loader else 0)

    def take(self, asked_ns: Any) -> Any:
        """When the next batch comes that is asked for at `asked_ns`."""
        loader = self._loader
        if loader is None:
            return asked_ns
        self._made_ns = self._made_ns + loader.batch_ns
        if len(self._taken_ns) == loader.capacity:
            self._made_ns = self._latest(self._made_ns, self._taken_ns[0])
        self._taken_ns.append(self._latest(asked_ns, self._made_ns))
        return self._taken_ns[-1]

    def since(self, now_ns: Any) -> list[Any]:
        """All that later batches depend on, in ticks since `now_ns`."""
        if self._loader is None:
            return []
        return [moment_ns - now_ns for moment_ns in (self._made_ns, *self._taken_ns)]
