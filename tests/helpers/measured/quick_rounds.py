"""`python -m measured.quick_rounds OPTIONS`: a rank's rounds, in turns with small layers.

Those of a record take 50 ms a lap, which tells a test nothing. Who imports this has them too.
"""

from __future__ import annotations

from calibrate.measure.cluster import rounds
from calibrate.measure.ddp.rounds import measure_rounds
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.rounds import RoundOptions

rounds._LAYERS["cpu"] = (4, 128, 32)

if __name__ == "__main__":
    run_rank(measure_rounds, RoundOptions)
