"""A model as DDP and the clock see it: its parameters, and the work between ready gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpsim.provenance import Provenance
from ddpsim.wording import ends_of

if TYPE_CHECKING:
    from ddpsim.importers.profiles.model import InterferenceExponent

# what the times rest on; "slowed": launches that the profiler slowed; "scaled": measured on another
# device; "shape": only their proportions are meant, a step time sets the scale
Basis = Literal["roofline", "measured", "slowed", "scaled", "shape"]

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


class Parameter(NamedTuple):
    """One trainable tensor; `dtype` is also its gradient's.

    `ddp_hook_s`: what DDP's hook on it takes a CPU under torch's default options, copy into the
    bucket and all, where it was measured in the model's own backward. `shape`: its extents; None:
    not known. `is_edge`: it is an embedding's or the output layer's, where that is known.
    """

    name: str
    numel: int
    dtype: str
    sparse: bool = False
    ddp_hook_s: float | None = None
    shape: tuple[int, ...] | None = None
    is_edge: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter, and of its gradient."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int | None:
        """The extent of its first dimension; None of a scalar, or where it is not known."""
        return self.shape[0] if self.shape else None


class Buffer(NamedTuple):
    """A tensor that DDP broadcasts before the forward, such as running statistics."""

    dtype: str
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * ITEM_BYTES[self.dtype]


class BatchNorm(NamedTuple):
    """A batch norm of so many channels, and the rows of forward and backward that hold its work."""

    name: str
    channels: int
    forward: int
    backward: int


class Work(NamedTuple):
    """Work for the device (seconds), and what the host does to launch it.

    So many `kernels` at the model's `launch_s` each, and `host_s` seconds besides. `names`: of the
    module or the gradient that it is of, or of the first and the last; none where not known.
    """

    device_s: float
    kernels: int = 0
    host_s: float = 0.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """One micro-batch of one rank, without DDP.

    `parameters` stand in registration order. `backward[i]` is the work that ends with the
    gradient of parameter `ready_order[i]`; one more entry is the tail after the last gradient.
    `launch_s` is the host's time per kernel launch. `iterations_s` are whole steps as measured,
    [iteration][rank]: only their spread is used. `sample_bytes`: of one sample's input. `later`:
    how many times as long forward and backward of a later micro-batch take, where it was measured.
    `sigma`: of the logarithm of all times, where it is known; None: `basis` says what is assumed.
    `with_ddp_s`: the whole step under DDP on one device alone, where it was measured with the rest.
    `interference_exponent`: of `ddpsim.importers.profiles`; None: not measured. `is_compiled`: the
    times are those of the model under torch.compile, `backward` as if it came without;
    `compiled_blocks`: of these modules alone, each on its own.
    `forward_modules`: the name of the module that each work of `forward` is of ("": of several);
    none where they are not known. `forward_outputs`: elements that each of them hands on, likewise.
    `batch_norms`: in the order of their calls, where the source tells of them. `flops`: of matrix
    products and convolutions, forward and backward, where the source tells of them.
    `float8_gathered`: places of parameters that fully_shard gathers in float8.
    `frozen_bytes`: of parameters that are not trained, and that each rank has whole.
    `recast_bytes`: of outputs that the loss casts, whose memory is free before the backward.
    """

    parameters: tuple[Parameter, ...]
    ready_order: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    optimizer: Work
    launch_s: float
    activation_bytes: float | None
    basis: Basis
    provenance: tuple[Provenance, ...]
    warnings: tuple[str, ...] = ()
    iterations_s: tuple[tuple[float, ...], ...] = ()
    sample_bytes: int | None = None
    later: tuple[float, float] | None = None
    sigma: float | None = None
    with_ddp_s: float | None = None
    interference_exponent: InterferenceExponent | None = None
    is_compiled: bool = False
    compiled_blocks: tuple[str, ...] = ()
    forward_modules: tuple[str, ...] = ()
    forward_outputs: tuple[float, ...] = ()
    batch_norms: tuple[BatchNorm, ...] = ()
    flops: float | None = None
    frozen_bytes: int = 0
    recast_bytes: float = 0.0
    float8_gathered: frozenset[int] = frozenset()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all parameters, and of the buckets that hold a gradient of each."""
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def used(self) -> tuple[Parameter, ...]:
        """Parameters that get a gradient, in the order in which they do."""
        return tuple(self.parameters[i] for i in self.ready_order)

    @property
    def unused(self) -> tuple[int, ...]:
        """Parameters whose gradient never becomes ready."""
        return tuple(sorted(set(range(len(self.parameters))) - set(self.ready_order)))

    @property
    def ties_weights(self) -> bool:
        """Whether a module is called that owns no parameter, so that it uses another's."""
        owners = {parameter.name.rpartition(".")[0] for parameter in self.parameters}
        return any(module and module not in owners for module in self.forward_modules)

    @property
    def tied(self) -> tuple[int, ...]:
        """The parameter that such a module uses: an embedding, whose gradient is ready last."""
        return self.ready_order[-1:] if self.ties_weights else ()

    @property
    def never_called(self) -> str | None:
        """A module without inner ones whose parameters another uses; None: there is none."""
        if not self.forward_modules:
            return None
        called = {f"{module}." for module in self.forward_modules}
        inner = {name[: i + 1] for name in called for i, mark in enumerate(name) if mark == "."}
        owners = (parameter.name.rpartition(".")[0] for parameter in self.parameters)
        return next((owner for owner in owners if owner and f"{owner}." not in inner), None)

    def named(self) -> Model:
        """Return the model with names of its forward and backward works, where they are known."""
        forward, gradients = self.forward_modules, (*(each.name for each in self.used), "")
        return replace(
            self,
            forward=_named(self.forward, forward) if forward else self.forward,
            backward=_named(self.backward, gradients),
        )

    def stretched(self, factor: float) -> Model:
        """Make the model's device work `factor` times as long.

        So are the launches of a model that was measured, as its times hold theirs.
        """
        return self._scaled(factor, 1.0 if self.basis == "roofline" else factor)

    @property
    def host_s(self) -> float:
        """The host's time for all launches."""
        works = (*self.forward, *self.backward, self.optimizer)
        return sum(work.kernels * self.launch_s + work.host_s for work in works)

    def launched(self, factor: float) -> Model:
        """Make the model's launches `factor` times as long."""
        return self._scaled(1, factor)

    def _scaled(self, device: float, host: float) -> Model:
        return replace(
            self,
            forward=scale(self.forward, device, host),
            backward=scale(self.backward, device, host),
            optimizer=scale((self.optimizer,), device, host)[0],
            launch_s=self.launch_s * host,
        )


def scale(works: Iterable[Work], factor: float, host_factor: float = 1) -> tuple[Work, ...]:
    """Work `factor` times as long on the device, with the same kernels."""
    return tuple(
        Work(work.device_s * factor, work.kernels, work.host_s * host_factor, work.names)
        for work in works
    )


def joined(works: Iterable[Work]) -> Work:
    """Several pieces of work as one."""
    *spent, names = zip(*works, strict=True)
    device_s, kernels, host_s = map(sum, spent)
    return Work(device_s, kernels, host_s, ends_of(names))


def _named(works: Iterable[Work], names: Iterable[str]) -> tuple[Work, ...]:
    each = zip(works, names, strict=True)
    return tuple(work._replace(names=(name,)) if name else work for work, name in each)


def total_s(works: Iterable[Work]) -> float:
    """Device seconds of several pieces of work."""
    return sum(work.device_s for work in works)
