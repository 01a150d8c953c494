"""Works of ranks that differ for good, over slow periods: by arrays as by each rank's integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpsim.engine.fast import work_sums
from ddpsim.engine.fast.lane import PER_MILLE, Slow, work_end_ns
from ddpsim.engine.fast.slow_periods import SlowPeriods

Periods = list[tuple[list[tuple[int, int]], int]]  # gap and length in each lane, and the factor

WORKS = st.lists(st.integers(1, 2000), min_size=1, max_size=20)
FACTORS = st.lists(st.sampled_from([0.93, 1.0, 1.0371, 1.3]), min_size=1, max_size=4)


@st.composite
def periods(draw: st.DrawFn, lanes: int) -> Periods:
    gaps = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 6000)), min_size=lanes)
    each = st.tuples(gaps.map(lambda pairs: pairs[:lanes]), st.sampled_from([1001, 1189, 3000]))
    return draw(st.lists(each, max_size=4))


@pytest.mark.parametrize("few", [0, 2**18], ids=["sums of eight works", "each sum"])
@given(st.data(), WORKS, FACTORS)
def test_works_end_as_those_of_each_rank(
    few: int, data: st.DataObject, works: list[int], factors: list[float]
) -> None:
    ranks = len(factors)
    drawn = data.draw(periods(ranks))
    now = data.draw(st.lists(st.integers(0, 4000), min_size=ranks, max_size=ranks))
    known, slow = SlowPeriods(), [list[Slow]() for _ in now]
    ends = [0] * ranks
    for pairs, factor in drawn:
        starts = [end + gap for end, (gap, _) in zip(ends, pairs, strict=True)]
        ends = [start + length for start, (_, length) in zip(starts, pairs, strict=True)]
        known.append(np.array(starts, float), np.array(ends, float), float(factor))
        for lane, start, end in zip(slow, starts, ends, strict=True):
            lane.append(Slow(start, end, factor, PER_MILLE))

    def end_ns(lane: int) -> int:
        end = now[lane]
        for work in works:
            end = work_end_ns(end, round(work * factors[lane]), slow[lane])
        return end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_sums, "_FEW", few)
        sums = work_sums.WorkSums(np.array(factors))
        asked = slice(0, ranks), np.array(now, float), np.array(works, float)
        found = known.lasting_ends(sums, *asked)
    assert found.tolist() == [end_ns(lane) for lane in range(ranks)]
