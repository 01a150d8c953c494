"""The user's model, ready to step on one device.

The contract of MODULE:FUNCTION: called with `batch=N`, it returns `(model, inputs, loss)`. `model`
is a module on the CPU in training mode; `inputs` a tensor, a tuple of positional arguments or a
dict of keyword arguments, of N samples; `loss` a function of what the model returns, to a scalar
tensor. Autocast, if wanted, belongs into the model and the loss.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import calibrate
from calibrate.measure.clock import Clock, Mark
from calibrate.measure.errors import MeasureError, first_line
from calibrate.records.rounds import OptimizerName
from calibrate.signals import Ended
from ddpsim.scenario.options.model_file import ITEM_BYTES
from ddpsim.wording import counted

SIZES = ("seq_len", "image_size")  # of a sample, as a scenario calls them
_TINY_PARAMETERS = 500


@contextmanager
def _optimizers_own_errors(
    reference: str, optimizer: OptimizerName, *, fused: bool
) -> Iterator[None]:
    """What an optimizer does not take, such as sparse gradients: told with the option."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        option = f"--optimizer {optimizer}{' --fused' if fused else ''}"
        raise MeasureError(
            f"{option} cannot step the parameters of {reference} ({one_line(error)}): give another"
        ) from error


@contextmanager
def users_own_errors(reference: str) -> Iterator[None]:
    """What goes wrong is the user's code, or what torch says to it: told with the place there."""
    try:
        yield
    except (MeasureError, torch.cuda.OutOfMemoryError, torch.AcceleratorError, Ended):
        raise
    except (Exception, SystemExit) as error:
        place = _place_of_users(error)
        where = f" ({place})" if place else ""
        raise MeasureError(f"{reference}{where}: {one_line(error)}") from error


def problem_in_code(error: Exception) -> MeasureError | None:
    """The error of a user's own code, with its place; or of torch, in its own words; or None."""
    if place := _place_of_users(error):
        return MeasureError(f"{place}: {one_line(error)}")
    if isinstance(error, RuntimeError):
        return MeasureError(f"{type(error).__name__}: {first_line(error)}")
    return None


def _place_of_users(error: BaseException) -> str:
    """File and line of the last step that is neither torch's, Python's own nor ours; or nothing.

    Nothing where it came about in torch.distributed: then the user's code only waited for others.
    """
    framework = Path(torch.__file__).parent
    ours = (framework, Path(calibrate.__file__).parent)
    python = Path(sysconfig.get_paths()["stdlib"])
    frames = extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).is_relative_to(framework / "distributed"):
        return ""
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_python = path.is_relative_to(python) and "site-packages" not in path.parts
        is_python = is_python or path.name in ("sitecustomize.py", "typing_extensions.py")
        if path.is_file() and not is_python and not any(map(path.is_relative_to, ours)):
            return f"{path.name}, line {frame.lineno}"
    return ""


def one_line(error: BaseException) -> str:
    """An error's kind and message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def find_function(reference: str) -> Callable[..., Any]:
    """The function named "package.module:function"; raises MeasureError with what is missing.

    Modules of the current folder are found, as `python -m` finds them.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise MeasureError(f"{reference!r} names no function: write MODULE:FUNCTION")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Ended:
        raise
    except SystemExit as error:
        raise MeasureError(
            f"{module_name} ended the program while it was imported (exit code {error.code}): put "
            'what only a script does, such as parse_args, under if __name__ == "__main__"'
        ) from error
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise MeasureError(f"{module_name} cannot be imported: {words}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise MeasureError(f"{module_name} has no function {name!r}")
    attribute: Callable[..., Any] = function
    return attribute


class Made(NamedTuple):
    """What the user's function returns."""

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]

    def forward(self) -> Tensor:
        """Run the model and the loss."""
        if isinstance(self.inputs, tuple):
            output = self.model(*self.inputs)
        elif isinstance(self.inputs, Mapping):
            output = self.model(**self.inputs)
        else:
            output = self.model(self.inputs)
        return self.loss(output)


@dataclass(frozen=True)
class Training:
    """What the user's function returns, and the optimizer, ready to step on one device.

    `make` makes it anew, with the model on the device; `unused`: parameters that DDP reduces and
    that got no gradient in the step that was tried.
    """

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer
    clock: Clock
    make: Callable[[], Made]
    unused: tuple[str, ...] = ()
    scaler: torch.amp.GradScaler | None = None

    def again(self) -> Training:
        """Make a model, a loss and an optimizer of its own, with the weights of this one.

        Made anew and not copied: a loss may use its model, and not every model can be copied.
        """
        model, _, loss = self.make()
        mine = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        for name, parameter in model.named_parameters():
            if id(parameter) in mine:
                raise MeasureError(
                    f"{name} is the same parameter in each model that the function returns, and "
                    "DDP needs models of their own: make all that is trained in the function"
                )
        try:
            model.load_state_dict(self.model.state_dict())
        except RuntimeError as error:
            raise MeasureError(
                "the function must return the same model each time that it is called "
                f"({one_line(error)})"
            ) from error
        return replace(self, model=model, loss=loss).optimizing()

    def optimizing(self, make: Callable[..., torch.optim.Optimizer] | None = None) -> Training:
        """Take a new optimizer, of the parameters that the model has now.

        `make` takes its class, parameters and options; omitted: it is of that class.
        """
        kind, options = type(self.optimizer), self.optimizer.defaults
        taken = inspect.signature(kind).parameters  # AdamW has a default that it does not take
        chosen = {key: value for key, value in options.items() if key in taken}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return replace(
            self, optimizer=make(kind, trained, **chosen) if make else kind(trained, **chosen)
        )

    def forward(self) -> Tensor:
        """Run the model and the loss."""
        return Made(self.model, self.inputs, self.loss).forward()

    def backward(self, loss: Tensor) -> None:
        """Make the gradients of a loss, scaled where there is a scaler."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()  # type: ignore[no-untyped-call]

    def passes(self, reduce: Callable[[], object] = lambda: None) -> tuple[Mark, Mark, Mark]:
        """Run forward and backward, which `reduce` belongs to; the points before and after each."""
        begun = self.clock.mark()
        loss = self.forward()
        computed = self.clock.mark()
        self.backward(loss)
        reduce()
        return begun, computed, self.clock.mark()

    def update(self) -> Mark:
        """Step the optimizer and drop the gradients; the point between the two."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        updated = self.clock.mark()
        self.optimizer.zero_grad()
        return updated


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Torch's threads on the CPU, for as long as the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch_of(reference: str, given: int | None) -> int:
    """The batch asked for, or the function's own default."""
    parameter = inspect.signature(find_function(reference)).parameters.get("batch")
    if parameter is None:
        name = reference.rpartition(":")[2]
        raise MeasureError(f"{reference} takes no argument batch: write def {name}(batch: int)")
    return default_of(reference, parameter, given)


def default_of(reference: str, parameter: inspect.Parameter, given: int | None) -> int:
    """The batch or the size that a function takes: what is given, or its own default."""
    value = parameter.default if given is None else given
    if value is parameter.empty:
        option = "--batch" if parameter.name == "batch" else "--size"
        raise MeasureError(f"{reference} has no default {parameter.name}: give {option}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MeasureError(f"{parameter.name} is {value!r}: wanted a whole number from 1")
    return value


def sizes_of(reference: str) -> dict[str, int]:
    """The size of a sample that the function takes unless told, by its name in a scenario."""
    parameters = inspect.signature(find_function(reference)).parameters
    defaults = {key: parameters[key].default for key in SIZES if key in parameters}
    return {key: size for key, size in defaults.items() if isinstance(size, int)}


def prepare(
    reference: str, batch: int, device: torch.device, optimizer: OptimizerName, *, fused: bool
) -> Training:
    """Make the model that MODULE:FUNCTION returns, on a device; raises MeasureError.

    One step is tried, so that what fails in the user's own code is said, with its place.
    """

    def make() -> Made:
        return _made(reference, batch, device)

    model, inputs, loss = make()
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options: dict[str, Any] = {"lr": 1e-4} | ({"fused": True} if fused else {})
    trained = [p for p in model.parameters() if p.requires_grad]
    with _optimizers_own_errors(reference, optimizer, fused=fused):
        stepping = classes[optimizer](trained, **options)
    training = Training(model, _moved(inputs, device), loss, stepping, Clock(device), make)
    with users_own_errors(reference):
        value, unused = _tried(training)
    if not torch.isfinite(value).all():
        raise MeasureError(
            f"the loss of {reference} is {value.item()}: arithmetic on such numbers may take "
            "another time than training does; give inputs and weights that train"
        )
    with _optimizers_own_errors(reference, optimizer, fused=fused):
        training.optimizer.step()
    training.optimizer.zero_grad()
    return replace(training, unused=unused)


def _made(reference: str, batch: int, device: torch.device) -> Made:
    """Call the user's function, from the same random state each time, and check what it returns."""
    function = find_function(reference)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- the generator that a user's function may draw from
    with users_own_errors(reference):
        made = checked(reference, function(batch=batch))
    return made._replace(model=made.model.to(device))


def checked(reference: str, made: Any) -> Made:
    """What the user's function returned; raises MeasureError where it is not what is wanted."""
    wanted = f"{reference} must return (model, inputs, loss)"
    if not isinstance(made, tuple) or len(made) != 3:
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise MeasureError(f"{wanted}, not {kind}")
    model, inputs, loss = made
    if not isinstance(model, nn.Module) or not callable(loss):
        kinds = ", ".join(type(part).__name__ for part in made)
        raise MeasureError(
            f"{wanted}: a torch.nn.Module, a tensor, tuple or dict, and a function; got {kinds}"
        )
    _check_model(reference, model)
    return Made(model, inputs, loss)


def _check_model(reference: str, model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise MeasureError(
            f"the model of {reference} is wrapped in DistributedDataParallel, and is wrapped here "
            "again: return the bare module"
        )
    if not model.training:
        raise MeasureError(
            f"the model of {reference} is in evaluation mode, and training is measured: call "
            "model.train() before it is returned"
        )
    reduced = reduced_parameters(model)
    if not reduced:
        raise MeasureError(
            f"the model of {reference} has no parameter that DDP reduces: one that requires a "
            "gradient, and is not set to be ignored"
        )
    for name, parameter in reduced.items():
        dtype_name(name, parameter)


def _tried(training: Training) -> tuple[Tensor, tuple[str, ...]]:
    """The loss of a first step, and the parameters that got no gradient in it.

    Told by hooks, as a gradient may be used and dropped within the backward.
    """
    training.optimizer.zero_grad()  # what the function itself may have left there
    got = set[str]()
    value = training.forward()  # which initialises what is lazy: before that it takes no hooks
    handles = hook_gradients(training.model, lambda name: lambda _: got.add(name))
    value.backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    return value, tuple(name for name in reduced_parameters(training.model) if name not in got)


def reduced_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What DDP reduces the gradients of, in its order, each once: trained ones, less the ignored.

    Source: torch's DistributedDataParallel._build_params_for_reducer, whose names have a dot before
    those of the model's own parameters.
    """
    ignored, reduced = _ignored(model), dict[str, nn.Parameter]()
    seen = set[nn.Parameter]()
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{place}.{name}"
            if parameter.requires_grad and whole not in ignored and parameter not in seen:
                seen.add(parameter)
                reduced[whole.removeprefix(".")] = parameter
    return reduced


def broadcast_buffers(model: nn.Module) -> list[Tensor]:
    """What DDP broadcasts from rank 0: all buffers but those that it is set to ignore."""
    ignored = _ignored(model)
    return [buffer for name, buffer in model.named_buffers() if name not in ignored]


def _ignored(model: nn.Module) -> set[str]:
    """Names below the model that is wrapped; those of a part of it do not count, as in DDP."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def not_modelled(model: nn.Module) -> list[str]:
    """What steps of a model do that predictions leave out."""
    layers = sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    warning = (
        f"{counted(layers, 'layer')} of SyncBatchNorm: the collectives of each, one in forward and "
        "one in backward, are not modelled; steps on several ranks take longer than predicted"
    )
    return [warning] if layers else []


def is_compiled(model: nn.Module) -> bool:
    """Whether it runs under torch.compile as a whole: torch.compile(model), or model.compile().

    Source: torch/_dynamo/eval_frame.py (OptimizedModule), torch/nn/modules/module.py, 2.13.
    """
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A compiled model runs as it would without; any other as it does."""
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def unused_in_words(training: Training) -> str:
    """The first of the parameters that got no gradient, and how many more there are."""
    first, *others = training.unused
    more = f" and {counted(len(others), 'other')}" if others else ""
    return f"parameter {first}{more}"


def hook_gradients(
    model: nn.Module, hook_of: Callable[[str], Callable[[Tensor], object]]
) -> list[Any]:
    """Have a hook called as the gradient of each parameter that DDP reduces is added up."""
    return [
        parameter.register_post_accumulate_grad_hook(hook_of(name))  # type: ignore[no-untyped-call]
        for name, parameter in reduced_parameters(model).items()
    ]


def _moved(inputs: Any, device: torch.device) -> Any:
    """Move each tensor to the device, in whatever containers they are."""

    def moves_itself(value: Any) -> bool:  # a tensor, or such as a packed sequence of them
        return callable(getattr(value, "to", None))

    def moved(leaf: Any) -> Any:
        if moves_itself(leaf):
            return leaf.to(device)
        if isinstance(leaf, Mapping):  # which is no container to torch
            return {name: _moved(value, device) for name, value in leaf.items()}
        if not is_dataclass(leaf):
            return leaf
        changed = copy(leaf)
        for item in fields(leaf):
            # past the class's own __setattr__: it may be frozen
            object.__setattr__(changed, item.name, _moved(getattr(leaf, item.name), device))
        return changed

    return tree_map(moved, inputs, is_leaf=moves_itself)


def dtype_name(name: str, parameter: nn.Parameter) -> str:
    """A parameter's dtype as profiles name it; raises MeasureError for one they do not know."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    if parameter.is_complex():
        raise MeasureError(
            f"{name} is {dtype}: complex parameters, which DDP takes, are not modelled here"
        )
    if dtype not in ITEM_BYTES:
        raise MeasureError(f"{name} is {dtype}: wanted one of {', '.join(ITEM_BYTES)}")
    return dtype


class TinyParameters(nn.Module):
    """Many tiny parameters: its backward does little beside accumulating their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(8) for _ in range(_TINY_PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers as there are, once the parameters are taken together."""
        return torch.cat(list(self.parts)) * x
