"""Observations that tell causes apart, and the cheapest one that tells the likely ones apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import log

from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.hypothesis import Hypothesis
from ddpsim.result.diagnosis import CheckToRun, Outcome, Predicted
from ddpsim.units import format_bytes, format_duration

_ENOUGH = 0.6  # of what the best check would tell
_LEAST_BITS = 0.02
_ALIKE = 1.3  # times as long, of two predicted times that a check does not tell apart


@dataclass(frozen=True)
class Suspect:
    """A likely cause, with what it predicts."""

    hypothesis: Hypothesis
    probability: float
    predicted: Predicted


@dataclass(frozen=True)
class Check:
    """An observation: what it shows `usual`ly, the time that it measures, or that in `words`.

    `minutes` are those of the person who makes it (assumed). `replaces`: the quantity that tells
    the same, where it was measured.
    """

    key: str
    minutes: float
    text: str
    command: Callable[[Case], str]
    applies: Callable[[Case], bool]
    usual: Callable[[Case], str] | None = None
    time_s: Callable[[Predicted], float] | None = None
    words: Callable[[Predicted], str] | None = None
    replaces: str = ""

    def outcomes(self, case: Case, suspects: Sequence[Suspect]) -> list[str]:
        """What the check shows under each suspect; it cannot tell apart those with equal words."""
        if self.usual is not None:
            usual = self.usual(case)
            return [each.hypothesis.signs.get(self.key, usual) for each in suspects]
        if self.words is not None:
            return [self.words(each.predicted) for each in suspects]
        return _alike([self.time_s(each.predicted) if self.time_s else 0.0 for each in suspects])


def _alike(times_s: Sequence[float]) -> list[str]:
    """Times in words; a time that is little longer than a shorter one has the shorter one's."""
    words: dict[float, str] = {}
    first_s = 0.0
    for seconds in sorted(times_s):
        if not words or seconds > _ALIKE * first_s:
            first_s = seconds
        words[seconds] = format_duration(first_s)
    return [words[seconds] for seconds in times_s]


def cheapest(
    case: Case, suspects: Sequence[Suspect], measured: Collection[str]
) -> CheckToRun | None:
    """The check of least effort among the most informative; None where none tells causes apart."""
    bits = {
        check: _bits(check, case, suspects)
        for check in CHECKS
        if check.applies(case) and check.replaces not in measured
    }
    best = max(bits.values(), default=0.0)
    if best < _LEAST_BITS:
        return None
    enough = [check for check in bits if bits[check] >= _ENOUGH * best]
    check = min(enough, key=lambda check: (check.minutes, -bits[check]))
    alike = _alike_by_outcome(check, case, suspects)
    outcomes = tuple(
        Outcome(each.hypothesis.key, shows, each.probability / _probability(same))
        for shows, same in alike.items()
        for each in same
    )
    expected = sum(max(each.probability for each in same) for same in alike.values())
    return CheckToRun(check.key, check.text, check.command(case), outcomes, expected)


def _alike_by_outcome(
    check: Check, case: Case, suspects: Sequence[Suspect]
) -> dict[str, list[Suspect]]:
    """Suspects that a check does not tell apart, by what it shows of them."""
    alike: dict[str, list[Suspect]] = defaultdict(list)
    for each, outcome in zip(suspects, check.outcomes(case, suspects), strict=True):
        alike[outcome].append(each)
    return alike


def _probability(suspects: Sequence[Suspect]) -> float:
    return sum(each.probability for each in suspects)


def _bits(check: Check, case: Case, suspects: Sequence[Suspect]) -> float:
    """How many bits a check's outcome is expected to tell of which cause it is."""
    whole = _probability(suspects)
    alike = _alike_by_outcome(check, case, suspects).values()
    parts = [_probability(same) / whole for same in alike]
    return -sum(part * log(part, 2) for part in parts if part)


def _without_data(predicted: Predicted) -> str:
    """Asks for a step that trains on one batch."""
    shorter_s = predicted.step_s - predicted.data_wait_s
    return "no shorter" if _ALIKE * shorter_s > predicted.step_s else "shorter"


def _launched(case: Case) -> str:
    cluster = case.cluster
    nodes = f"--nnodes {cluster.nodes} " if cluster.nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.gpus_per_node} train.py"


def _nccl_tests(case: Case) -> str:
    cluster, size = case.cluster, format_bytes(largest_bytes(case) or 0)
    amount = size.replace(" ", "").rstrip("B")
    of_size = f"-b {amount} -e {amount}"
    if cluster.nodes == 1:
        return f"all_reduce_perf {of_size} -g {cluster.gpus_per_node}"
    return f"mpirun -np {cluster.world_size} -N {cluster.gpus_per_node} all_reduce_perf {of_size}"


def largest_bytes(case: Case) -> int | None:
    """The largest all-reduce of a step; None where there is none."""
    sent = case.job.program.steady().sent_bytes("all_reduce")
    return max(sent, default=None) if case.cluster.world_size > 1 else None


def _with_nccl(case: Case) -> bool:
    return case.cluster.world_size > 1 and case.scenario.ddp.backend == "nccl"


def _transport(case: Case) -> str:
    inter = case.inter
    if inter is None:
        return "P2P between GPUs of one node" if case.has_nvlink else "P2P or SHM between the GPUs"
    return "NET/Socket on the fast interface" if inter.transport == "tcp" else "NET/IB, or a plugin"


def _always(text: str) -> Callable[[Case], str]:
    return lambda _case: text


CHECKS = (
    Check(
        "code",
        1,
        "what the training script asks for",
        _always(
            "grep -nE 'find_unused|no_sync|DataParallel|bucket_cap|comm_hook|autocast|anomaly|"
            "item\\(' train.py"
        ),
        lambda _case: True,
        _always("as the scenario says"),
    ),
    Check(
        "environment",
        1,
        "what torch and NCCL are told by the environment of a rank",
        _always("tr '\\0' '\\n' < /proc/PID-OF-A-RANK/environ | grep -E 'NCCL_|TORCH_|CUDA_'"),
        lambda _case: True,
        _always("as the scenario says"),
    ),
    Check(
        "ddp_logging",
        2,
        "after 20 steps, the order of parameters in DDP's buckets, and that of their gradients",
        _always(
            "d = model._get_ddp_logging_data(); print(d['rebuilt_per_bucket_param_indices'], "
            "d['prev_iteration_grad_ready_order_indices'])"
        ),
        lambda case: case.is_ddp and case.cluster.world_size > 1,
        _always("both are the same"),
    ),
    Check(
        "gpu_state",
        2,
        "clocks and load of the GPUs of each node, while it trains",
        _always(
            "nvidia-smi --query-gpu=index,utilization.gpu,clocks.sm,clocks.max.sm,power.draw "
            "--format=csv"
        ),
        lambda case: case.cluster.device.kind == "gpu",
        _always("all GPUs busy, at full clocks"),
    ),
    Check(
        "nccl_log",
        2,
        "what NCCL says that it sends over; diagnose reads the whole log with --nccl-log",
        lambda case: f"NCCL_DEBUG=INFO {_launched(case)} 2>&1 | grep -E 'via|NET/|set by'",
        _with_nccl,
        _transport,
        replaces="nccl_log",
    ),
    Check(
        "peer_to_peer_off",
        3,
        "the step with NCCL_P2P_DISABLE=1",
        lambda case: f"NCCL_P2P_DISABLE=1 {_launched(case)}",
        lambda case: case.intra is not None and not case.has_nvlink,
        _always("no shorter"),
    ),
    Check(
        "connections",
        5,
        "what one TCP connection carries from node to node, and what eight carry together",
        _always("for n in 1 8; do iperf3 -c OTHER-NODE -P $n; done"),
        lambda case: case.inter is not None and case.inter.transport == "tcp",
        _always("8 fill the NIC, and 1 is not far below"),
    ),
    Check(
        "one_batch",
        4,
        "the step of a loop that trains on one batch again and again, without the loader",
        _always("batch = next(iter(loader)); [train_step(batch) for _ in range(50)]"),
        lambda _case: True,
        words=_without_data,
        replaces="data_wait",
    ),
    Check(
        "without_sync",
        5,
        "the step under model.no_sync(), and then diagnose with --measured-without-sync",
        _always("with model.no_sync(): [train_step(batch) for _ in range(50)]"),
        lambda case: case.is_ddp and case.cluster.world_size > 1,
        time_s=lambda predicted: predicted.without_sync_s,
        replaces="without_sync",
    ),
    Check(
        "per_rank",
        6,
        "the time of the forward pass, printed by each rank",
        _always("torch.cuda.synchronize() before and after model(batch); print(rank, seconds)"),
        lambda case: case.cluster.world_size > 1,
        _always("as predicted on all ranks"),
        replaces="per_rank",
    ),
    Check(
        "all_reduce",
        10,
        "the largest all-reduce of the step by itself (nccl-tests), and then diagnose with "
        "--measured-all-reduce",
        _nccl_tests,
        _with_nccl,
        time_s=lambda predicted: predicted.all_reduce_s or 0.0,
        replaces="all_reduce",
    ),
)
