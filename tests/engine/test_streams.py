"""Streams, communication lanes and meetings of ranks: who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jobs.engine_runs import PLAIN, OneTransfer, ddp_of, one_bucket
from simpy import Environment

from ddpsim.cluster.build import build_network
from ddpsim.cluster.transfers import WholeTransfer
from ddpsim.engine.reference.comm_lane import Collective, CommLane
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.rank import Rank
from ddpsim.engine.reference.stream import Stream
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import SimulationError
from ddpsim.prediction.program import compile_program
from ddpsim.result.timeline import Span
from ddpsim.strategies.instructions import Await, Communicate, Compute
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Buffer


@pytest.mark.parametrize(("blocking", "ends_ns"), [(False, [120, 220]), (True, [120, 240])])
def test_a_hooks_work_holds_a_thread_but_no_stream(blocking: bool, ends_ns: list[int]) -> None:
    """Two collectives of 100 each, and 20 after each of them: a GPU does that beside the second."""
    env, ends = Environment(), []

    class Hundred(OneTransfer):
        def transfer(self, *_: Any) -> WholeTransfer:
            return WholeTransfer(0, 100)

    network, compute = Network(env, Hundred(), 1), Stream(env, None)
    lane = CommLane(
        env, 0, network, compute, None, workers=1, spins=not blocking, blocking=blocking
    )
    for key in ("a", "b"):
        ready, done = env.event().succeed(0), env.event()
        done.callbacks.append(lambda _: ends.append(int(env.now)))
        launched = Communicate(0, 0, "all_reduce", 8, after_ns=20)
        lane.launch(Collective(key, launched, ready, done))
    env.run()
    assert ends == ends_ns


def test_a_bucket_with_an_unused_parameter_waits_for_the_map() -> None:
    """Which goes after all buckets (torch: reducer.cpp, finalize_bucket_dense)."""
    ddp = ddp_of(one_bucket()[0])
    (bucket,) = ddp.rebuilt_buckets
    first, second = (bucket._replace(parameters=(i,)) for i in (0, 1))
    forward, backward = ddp.model.first
    model = replace(ddp.model, ready_order=(0,), first=(forward, backward[:2]))
    reducer = replace(
        ddp.reducer,
        ready_order=(0,),
        unused=(1,),
        copy_in=ddp.reducer.copy_in[:1] * 2,
        used_map_bytes=8,
    )
    ddp = replace(ddp, model=model, reducer=reducer)
    for order, last in (
        ((first, second), [0, "copy", 1, 2, "copy"]),
        ((second, first), [0, 1, 2, "copy", 1, "copy"]),
    ):
        found = [
            each.number if isinstance(each, Await) else "copy"
            for each in replace(ddp, rebuilt_buckets=order).step(1)
            if isinstance(each, Await) or (isinstance(each, Compute) and each.kind == "copy_back")
        ]
        assert found == last


def test_two_broadcasts_of_buffers_are_in_flight() -> None:
    """As in torch's broadcast_coalesced: the second is launched before the first is copied back."""
    model = replace(build_model(PLAIN), buffers=(Buffer("float32", 1000), Buffer("int64", 20)))
    loop = compile_program(PLAIN, model).steady_step
    sent = [i for i, each in enumerate(loop) if isinstance(each, Communicate)][:2]
    waits = [i for i, each in enumerate(loop) if isinstance(each, Await)][:2]
    assert sent[1] < waits[0] < waits[1]


def test_streams_are_fifo_with_cudas_verbs() -> None:
    env, spans = Environment(), list[Span]()
    stream, other = Stream(env, spans.append), Stream(env, None)
    stream.launch("forward", 10)
    done = stream.record()
    other.wait(done, "comm_wait")
    other.launch("backward", 5)
    end = other.record()
    stream.launch("optimizer", 3)
    env.run(until=end)
    assert (done.value, env.now) == (10, 15)
    assert spans == [Span("forward", 0, 10), Span("optimizer", 10, 13)]


def test_a_rank_that_never_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program, scenario = one_bucket()
    train = Rank.train

    def leave_early(self: Rank) -> Any:
        if self.rank == 2:
            yield self.env.timeout(1)
            return
        yield from train(self)

    monkeypatch.setattr(Rank, "train", leave_early)
    steps = program.warmup + program.iterations
    with pytest.raises(SimulationError, match="the simulated job hangs") as caught:
        run(Request(program, build_network(scenario).cost, 4, np.ones((4, steps))), "reference")
    assert "rank 0 waits for its compute stream" in str(caught.value)
    assert "ranks [0, 1, 3] wait for [2]" in str(caught.value)


def test_a_meeting_waits_for_all() -> None:
    env = Environment()

    class Fixed:
        def transfer(self, operation: str, size_bytes: int) -> WholeTransfer:
            return WholeTransfer(5, 100)

        def stretched(self, factor: float) -> Any:
            return self

    network = Network(env, Fixed(), 2)
    ends = []

    def member(rank: int, delay: int) -> Any:
        yield env.timeout(delay)
        meeting = network.join("k", "all_reduce", 8, rank)
        yield meeting.ends[rank]
        ends.append((rank, int(env.now), meeting.met_ns))

    env.process(member(0, 0))
    env.process(member(1, 40))
    env.run()
    assert ends == [(0, 145, 40), (1, 145, 40)]
