"""PowerSGD's hook on one bucket: three all-reduces, one after another, and the work around them.

Source: torch 2.13 torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py. A parameter is a
matrix of n rows and m columns. It is compressed where (n + m) r is small beside n m (79-104); the
others are reduced together as they are (563). Then P = M Q (557) is reduced, orthogonalised, and
Q = M^T P (593) is (602); M is P Q^T (614). The callbacks run within the hook, on the host's thread,
and `torch.cuda.synchronize` (628) ends it: no backward goes on meanwhile. A wrapper casts the
bucket before all that, and back after it (default_hooks.py: fp16_compress_wrapper). The batched
hook (655) has one square matrix of the whole bucket, nothing uncompressed, and the error before the
synchronisation. Of float32 and more than two columns torch takes a QR (31).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from ddpsim.errors import InputError
from ddpsim.scenario.options.hooks import PowerSgd
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.strategy import Bucket, Stage
from ddpsim.strategies.ticks import Launch
from ddpsim.units import MIB
from ddpsim.workload.model import ITEM_BYTES, Parameter, Work, joined

_MOST_BY_GRAM_SCHMIDT = 2  # columns of float32
# of a column: norm, scaling and the reflector's own; of what is left of the panel: product and
# update, once to factor and once to form Q; torch's linalg.qr copies its input in, Q and R out
_OF_PANEL = 4
_QR_COPIES = 3


class _Matrix(NamedTuple):
    """A compressed parameter: its bytes, its rows and columns, the columns of P and Q."""

    size_bytes: int
    rows: int
    columns: int
    rank: int
    item_bytes: int


def in_stages(
    bucket: Bucket, parameters: Sequence[Parameter], spec: PowerSgd, prices: Prices
) -> Bucket:
    """A bucket of these parameters under PowerSGD; raises InputError where no shape is known."""
    dtype = prices.ddp.sent_dtype or parameters[0].dtype
    if spec.batched:
        parameters = [_square(bucket, parameters[0].dtype)]
    parameters = [parameter._replace(dtype=dtype) for parameter in parameters]
    size_bytes = sum(parameter.size_bytes for parameter in parameters)
    wrapped = [prices.moved(bucket.size_bytes + size_bytes)] if prices.ddp.sent_dtype else []
    work = _Hook(parameters, spec, prices, [prices.operator(cast) for cast in wrapped])
    item_bytes = ITEM_BYTES[parameters[0].dtype]
    p_bytes = item_bytes * sum(m.rows * m.rank for m in work.matrices)
    q_bytes = item_bytes * sum(m.columns * m.rank for m in work.matrices)
    others_bytes = sum(parameter.size_bytes for parameter in work.others)
    others = Stage(work.before(size_bytes), others_bytes, "uncompressed gradients")
    narrow = Stage(work.unpacked(others_bytes), p_bytes, "PowerSGD's P")
    if spec.batched:
        narrow = narrow._replace(before=others.before)
    second = Stage(work.orthogonal_and_multiplied(), q_bytes, "PowerSGD's Q")
    return bucket._replace(
        wire_bytes=others_bytes + p_bytes + q_bytes,
        stages=(narrow, second) if spec.batched else (others, narrow, second),
        before_wait=work.decompressed(q_bytes, size_bytes if spec.batched else 0),
        after_wait=work.error(0 if spec.batched else size_bytes),
        kept_bytes=size_bytes + p_bytes + q_bytes,
    )


def _square(bucket: Bucket, dtype: str) -> Parameter:
    """The whole bucket as a square matrix, padded with zeros."""
    side = math.isqrt(bucket.size_bytes // ITEM_BYTES[dtype] - 1) + 1
    return Parameter("bucket", side * side, dtype, shape=(side, side))


class _Hook:
    """The hook's work on one bucket, each operator of it launched by the host."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        spec: PowerSgd,
        prices: Prices,
        casts: Sequence[Work] = (),
    ) -> None:
        """`casts`: of a wrapper, of the bucket before the hook, and back after it."""
        self._prices = prices
        self._casts = casts
        self._by_qr = prices.ddp.sent_dtype is None and parameters[0].dtype == "float32"
        shaped = [(parameter, _matrix(parameter, spec)) for parameter in parameters]
        self.matrices = [matrix for _, matrix in shaped if matrix]
        self.others = [parameter for parameter, matrix in shaped if not matrix]

    def before(self, size_bytes: int) -> Launch:
        """The last error added, a copy kept, the others in one tensor; Q orthogonal, P = M Q."""
        others_bytes = sum(parameter.size_bytes for parameter in self.others)
        passes = [self._prices.passed(3 * size_bytes), self._prices.passed(2 * size_bytes)]
        gathered = [self._prices.passed(2 * others_bytes)] if others_bytes else []
        return self._prices.launch(
            [
                *self._casts,
                *passes,
                *gathered,
                *self._orthogonal("columns"),
                *self._products(),
            ]
        )

    def unpacked(self, others_bytes: int) -> Launch:
        """The others divided, and each copied back."""
        copies = [self._prices.passed(2 * parameter.size_bytes) for parameter in self.others]
        return self._prices.launch([self._prices.passed(2 * others_bytes), *copies])

    def orthogonal_and_multiplied(self) -> Launch:
        """P orthogonal, Q = M^T P."""
        return self._prices.launch([*self._orthogonal("rows"), *self._products()])

    def decompressed(self, q_bytes: int, size_bytes: int) -> Launch:
        """Q divided, M = P Q^T; the error of so many bytes."""
        return self._prices.launch(
            [self._prices.passed(2 * q_bytes), *self._products(), *self._lost(size_bytes)]
        )

    def error(self, size_bytes: int) -> Launch:
        """The error of so many bytes, and a wrapper's cast back."""
        return self._prices.launch([*self._lost(size_bytes), *self._casts])

    def _lost(self, size_bytes: int) -> list[Work]:
        """What the compression has lost: the copy less the bucket."""
        return [self._prices.passed(3 * size_bytes)] if size_bytes else []

    def _products(self) -> list[Work]:
        """One of each matrix, which reads or writes all of it: bound by memory, or as measured."""
        products = (self._prices.product(m.size_bytes, m.rank) for m in self.matrices)
        return [self._prices.operator(work) for work in products]

    def _orthogonal(self, side: str) -> list[Work]:
        """Gram-Schmidt, an operator each: norm and quotient of a column, the rest projected."""
        works: list[Work] = []
        for matrix in self.matrices:
            column_bytes = matrix.item_bytes * (matrix.rows if side == "rows" else matrix.columns)
            if self._by_qr and matrix.rank > _MOST_BY_GRAM_SCHMIDT:
                works.append(self._qr(matrix.rank, column_bytes))
                continue
            operators = 2 * matrix.rank + 4 * (matrix.rank - 1)
            works += operators * [self._prices.passed(2 * column_bytes)]
        return works

    def _qr(self, rank: int, column_bytes: int) -> Work:
        """One operator; its kernels are assumed to be those of LAPACK's geqr2 and org2r."""
        column = self._prices.moved(2 * column_bytes)
        panel = self._prices.moved((rank + 1) * column_bytes)  # half of it is left on average
        kernels = [*(3 * rank * [column]), *(_OF_PANEL * rank * [panel])]
        copies = _QR_COPIES * [self._prices.moved(2 * rank * column_bytes)]
        return self._prices.operator(joined([*kernels, *copies]))


def _matrix(parameter: Parameter, spec: PowerSgd) -> _Matrix | None:
    """The parameter as PowerSGD compresses it; None where that would save too little."""
    if parameter.rows is None:
        raise InputError(
            "ddp.comm_hook",
            f"powerSGD needs the shape of {parameter.name}, which the profile or trace does not "
            "tell; give a zoo model or a parameter list",
        )
    rows, columns = parameter.rows, parameter.numel // parameter.rows
    rank = min(rows, columns, spec.matrix_approximation_rank)
    if not spec.batched and (rows + columns) * rank * spec.min_compression_rate >= rows * columns:
        return None
    return _Matrix(parameter.size_bytes, rows, columns, rank, ITEM_BYTES[parameter.dtype])


def check_one_bucket(buckets: int, parameters: Sequence[Parameter]) -> None:
    """Raises InputError for several buckets on gloo.

    Callbacks hold its two threads while they wait for collectives that need one, and those of two
    buckets cross: seen with torch 2.13, where ranks hung, and where gloo ended a process.
    """
    if buckets > 1:
        cap_mib = ceil(sum(parameter.size_bytes for parameter in parameters) / MIB)
        raise InputError(
            "ddp.comm_hook",
            f"powerSGD may hang or crash with gloo where gradients are in several buckets, here "
            f"{buckets}: their collectives cross; put all in one with ddp.bucket_cap_mb={cap_mib}, "
            "or write none, allreduce, fp16_compress, bf16_compress or top_k",
        )
