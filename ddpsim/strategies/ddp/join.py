"""DDP's join: what each forward sends so that ranks without inputs can shadow the others.

Source: torch 2.13 torch/distributed/algorithms/join.py (notify_join_context) and
torch/nn/parallel/distributed.py (_pre_forward, _find_common_rank,
_check_global_requires_backward_grad_sync); reducer.cpp (set_divide_factor). A rank that has no more
inputs launches the same collectives of zeros (_DDPJoinHook.main_hook), so every step of the others
takes what it took before.
"""

from __future__ import annotations

from typing import NamedTuple

from ddpsim.scenario.options.loops import Join
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Instruction,
    Synchronize,
)
from ddpsim.strategies.training_loop.around_optimizer import read_value

_FLOAT_BYTES, _INTEGER_BYTES = 4, 8
_HAS_INPUTS, _COMMON_RANK, _REDUCES = -2, -3, -4  # numbers beside those of the reducer


class JoinedForward(NamedTuple):
    """What join adds to a forward, in order: nothing where it is not used.

    `notified`: this rank has inputs. `agreed`: before the buffers' broadcast, from which rank.
    `announced`: whether the backward reduces. `divisor`: within the first hook of the backward, the
    number of ranks with inputs. `ended`: nobody waits for what was sent, but it ends before the
    buckets do.
    """

    notified: tuple[Instruction, ...] = ()
    agreed: tuple[Instruction, ...] = ()
    announced: tuple[Instruction, ...] = ()
    divisor: tuple[Instruction, ...] = ()
    ended: tuple[Instruction, ...] = ()

    @classmethod
    def of(cls, join: Join | None, prices: Prices) -> JoinedForward:
        """What a job's options ask for."""
        if join is None:
            return cls()
        read = read_value(prices)
        sends = _Sends(read[0], prices.call_ns)
        divisor = () if join.divide_by_initial_world_size else (Await(_HAS_INPUTS), *read)
        rank = sends.launched(_COMMON_RANK, _INTEGER_BYTES, "join: rank with buffers")
        return cls(
            sends.launched(_HAS_INPUTS, _FLOAT_BYTES, "join: ranks with inputs"),
            # the rank's number is copied to the device from memory that is not pinned, and the
            # result is read twice
            (rank[0], Synchronize(), *rank[1:], Await(_COMMON_RANK), *read, *read),
            sends.launched(_REDUCES, _FLOAT_BYTES, "join: ranks that reduce"),
            divisor,
            (Await(_HAS_INPUTS), Await(_REDUCES)),
        )


NOT_JOINED = JoinedForward()


class _Sends(NamedTuple):
    """All-reduces of one element, which an operator fills first."""

    value: Instruction
    launch_ns: int

    def launched(self, number: int, size_bytes: int, cause: str) -> tuple[Instruction, ...]:
        sent = Communicate(number, self.launch_ns, "all_reduce", size_bytes, cause=cause)
        return self.value, sent
