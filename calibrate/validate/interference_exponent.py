"""How much more than usual layers a model suffers beside all-reduces. Knows nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from calibrate.fit.estimates import at_most, averaged, shares_kept, usual_time
from calibrate.records.rounds import Beside, Samples
from ddpsim.importers.profiles.cluster import Fitted

_KNOWN = 0.1  # a larger standard error tells nothing: a slow network hardly slows down any compute
_LEAST_LOST = 1e-3


def interference_exponent(runs: Sequence[Beside]) -> Fitted | None:
    """The power of what layers keep of their speed that a model keeps; 1: it fares as they do.

    A power, so that both keep all beside no bytes and neither less than nothing. Of several runs
    from the means of what is kept. None where it is not known to a tenth.
    """
    if not runs:
        return None
    layers = _kept([(run.layers_s, run.layers_beside_s) for run in runs])
    model = _kept([(run.backward_s, run.backward_beside_s) for run in runs])
    if layers.value > 1 - _LEAST_LOST or layers.stderr is None or model.stderr is None:
        return None
    lost = -math.log(layers.value)
    power = -math.log(model.value) / lost
    relative = model.stderr / model.value, power * layers.stderr / layers.value
    stderr = math.hypot(*relative) / lost
    return Fitted(value=power, stderr=stderr) if stderr <= _KNOWN else None


def profile_keys(runs: Sequence[Beside]) -> dict[str, float | None]:
    """The exponent as a model profile has it; nothing where it is not known."""
    exponent = interference_exponent(runs)
    keys = ("interference_exponent", "interference_exponent_stderr")
    return dict(zip(keys, (exponent.value, exponent.stderr), strict=True)) if exponent else {}


def _kept(runs: Sequence[tuple[Samples, Samples]]) -> Fitted:
    """The mean over runs and ranks of the usual share, as a record's fit takes it."""
    shares = [
        usual_time(shares_kept(alone, beside))
        for run in runs
        for alone, beside in zip(*(zip(*samples, strict=True) for samples in run), strict=True)
    ]
    return at_most(averaged(shares), 1.0)
