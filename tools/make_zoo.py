"""Measure the zoo models on the meta device and write ddpsim/data/zoo/<name>.json.

Every number comes from running one real training step (forward, loss, backward) of the real
module on torch.device("meta"): shapes flow, no memory is allocated and nothing is computed.
A dispatch mode sees each aten operator and adds up its cost:

* FLOPs: 2 per multiply-add, from torch.utils.flop_counter. A causal mask does not halve them.
* elements: read plus written per operator, whatever their dtype, from real storages (a broadcast
  operand counts once); a tensor that is updated in place is both read and written.
* kernels: one per operator that launches something.

Costs are then fitted exactly as fixed + batch * (c0 + c1 * x + c2 * x**2).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

SCHEMA = "ddpsim.model/1"
OUTPUT = Path(__file__).resolve().parent.parent / "ddpsim" / "data" / "zoo"
COSTS = ("matmul_flops", "matmul_elements", "other_elements")

aten = torch.ops.aten

# Allocations and reshapes whose schema does not say that they alias; no kernel is launched.
FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# Tensor arguments (by position) that are not read in full: only their shape matters, or only one
# element per row is picked (nll_loss), or they are about to be overwritten.
UNREAD: dict[str, tuple[int, ...]] = {
    "_adaptive_avg_pool2d_backward": (1,),
    "copy_": (0,),
    "embedding": (0,),
    "fill_": (0,),
    "max_pool2d_with_indices_backward": (1,),
    "new_zeros": (0,),
    "nll_loss_backward": (1,),
    "nll_loss_forward": (0,),
    "ones_like": (0,),
    "zero_": (0,),
    "zeros_like": (0,),
}


@dataclass
class Cost:
    """Work of a run of operators: FLOPs, elements read plus written, kernel launches."""

    matmul_flops: int = 0
    matmul_elements: int = 0
    other_elements: int = 0
    kernels: int = 0

    def add(self, other: Cost) -> None:
        """Add the work of `other` to this one."""
        self.matmul_flops += other.matmul_flops
        self.matmul_elements += other.matmul_elements
        self.other_elements += other.other_elements
        self.kernels += other.kernels


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def touched(tensor: Tensor) -> int:
    """Elements of storage behind a tensor: a dimension of stride 0 (expand) counts once."""
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def storage_of(tensor: Tensor) -> Any:
    """Hashable identity of the storage behind a tensor, never reused while it is held."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def traffic(group: Iterable[Tensor]) -> int:
    """Elements of distinct views in a group of tensors, at most the size of each storage."""
    views: dict[Any, dict[tuple[Any, ...], int]] = {}
    capacity: dict[Any, int] = {}
    for tensor in group:
        storage = storage_of(tensor)
        key = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        views.setdefault(storage, {})[key] = touched(tensor)
        capacity[storage] = tensor.untyped_storage().nbytes() // tensor.element_size()
    return sum(min(sum(sizes.values()), capacity[key]) for key, sizes in views.items())


def name_of(func: Any) -> str:
    """Name of an operator without namespace and overload, such as "addmm"."""
    return str(func.overloadpacket.__name__)


def is_free(func: Any) -> bool:
    """Whether an operator launches nothing: views, metadata, allocations."""
    return bool(func.is_view) or name_of(func) in FREE


def convolution_backward_flops(args: Sequence[Any], out: Any) -> int:
    """FLOPs of aten.convolution_backward; args as in its schema."""
    formula = flop_registry[aten.convolution_backward]
    needs_input, needs_weight, _ = args[10]
    by_input = int(formula(*args[:10], [needs_input, False, False], out_val=out))
    by_weight = int(formula(*args[:10], [False, needs_weight, False], out_val=out))
    # flop_counter multiplies all input with all output channels for the weight gradient, also
    # those of different groups ("I skip those" in its conv_backward_flop).
    return by_input + by_weight // int(args[9])


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one matmul-class operator call, 2 per multiply-add."""
    if func.overloadpacket is aten.convolution_backward:
        return convolution_backward_flops(args, out)
    return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))


def reads_of(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Elements that one operator call reads."""
    unread = UNREAD.get(name, ())
    read = [arg for position, arg in enumerate(args) if position not in unread]
    picked = int(out.numel()) if name == "embedding" else 0
    return traffic(tensors((read, kwargs))) + picked


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Cost:
    """Work of one operator call."""
    written = tensors(out)
    if is_free(func) or not written:
        return Cost()
    name = name_of(func)
    elements = reads_of(name, args, kwargs, out) + traffic(written)
    if func.overloadpacket not in flop_registry:
        return Cost(other_elements=elements, kernels=1)
    kernels = sum(args[10][:2]) if name == "convolution_backward" else 1
    return Cost(flops_of(func, args, kwargs, out), elements, 0, kernels)


class Recorder(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Adds up the work of every operator until `cut` starts the next segment."""

    def __init__(self) -> None:
        """Start with an empty segment."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.segment = Cost()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and record it."""
        out = func(*args, **(kwargs or {}))
        self.segment.add(cost_of(func, args, kwargs or {}, out))
        return out

    def cut(self) -> Cost:
        """End the current segment and return its work."""
        done, self.segment = self.segment, Cost()
        return done


class Saved:
    """Distinct storages that autograd keeps for backward, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the storages of the model, which do not count."""
        owned = [*model.parameters(), *model.buffers()]
        self.model = {storage_of(tensor) for tensor in owned}
        self.sizes: dict[Any, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a saved tensor of any shape."""
        storage = storage_of(tensor)
        if storage not in self.model:
            self.sizes[storage] = tensor.untyped_storage().nbytes()
        return tensor

    def nbytes(self) -> int:
        """Bytes of all storages noted, at the dtypes of the run."""
        return sum(self.sizes.values())


@dataclass
class Step:
    """One measured training step: segments in execution order and bytes saved for backward."""

    modules: list[str] = field(default_factory=list)
    forward: list[Cost] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    backward: list[Cost] = field(default_factory=list)
    saved_bytes: int = 0

    def structure(self) -> tuple[Any, ...]:
        """What must not depend on the batch or the size."""
        segments = (*self.forward, *self.backward)
        return self.modules, self.ready, [segment.kernels for segment in segments]

    def values(self) -> dict[str, list[int]]:
        """Column name -> one number per segment; "saved_bytes" has one row."""
        columns = {"saved_bytes": [self.saved_bytes]}
        for phase, segments in (("forward", self.forward), ("backward", self.backward)):
            for cost in COSTS:
                columns[f"{phase}.{cost}"] = [getattr(segment, cost) for segment in segments]
        return columns


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> Tensor:
    """Flash attention in place of scaled_dot_product_attention; (batch, heads, seq, dim)."""
    names = ("attn_mask", "dropout_p", "is_causal")
    settings = dict(zip(names, options, strict=False)) | named
    if settings.get("attn_mask") is not None:
        raise ValueError("flash attention takes no mask")
    dropout, causal = settings.get("dropout_p", 0.0), settings.get("is_causal", False)
    fused = aten._scaled_dot_product_flash_attention  # noqa: SLF001 - it has no public name
    out: Tensor = fused(query, key, value, dropout, causal, scale=settings.get("scale"))[0]
    return out


def fused_dropout(values: Tensor, p: float = 0.5, *flags: bool, **named: bool) -> Tensor:
    """One-kernel dropout in place of torch.nn.functional.dropout, any shape."""
    settings = dict(zip(("training", "inplace"), flags, strict=False)) | named
    if p == 0 or not settings.get("training", True):
        return values
    return torch.native_dropout(values, p, train=True)[0]


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Make the composite operators take the fused path that they take on a CUDA device.

    On the meta device scaled_dot_product_attention decomposes into matrix products and a softmax,
    and dropout into bernoulli_, div_ and mul.
    """
    fused = patch.multiple(
        functional, scaled_dot_product_attention=fused_attention, dropout=fused_dropout
    )
    with ExitStack() as stack:
        stack.enter_context(fused)
        if "transformers" in sys.modules:
            # It looks at the values of position_ids, which a meta tensor does not have.
            probe = "transformers.masking_utils.find_packed_sequence_indices"
            stack.enter_context(patch(probe, lambda _: None))
        yield


def add_forward_hooks(model: nn.Module, step: Step, recorder: Recorder) -> list[Any]:
    """Start a forward segment whenever a module that owns parameters is called."""

    def hook(name: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            if step.modules:
                step.forward.append(recorder.cut())
            step.modules.append(name)

        return start

    return [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]


def add_ready_hooks(model: nn.Module, step: Step, recorder: Recorder) -> list[Any]:
    """End a backward segment whenever the gradient of a parameter is ready."""

    def hook(index: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            step.ready.append(index)
            step.backward.append(recorder.cut())

        return ready

    handles = []
    for index, tensor in enumerate(trained_parameters(model).values()):
        handle = tensor.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
        handles.append(handle)
    return handles


def drop_idle(step: Step) -> None:
    """Drop forward segments without kernels: containers that only hold a parameter."""
    pairs = zip(step.modules, step.forward, strict=True)
    kept = [(name, cost) for name, cost in pairs if cost.kernels]
    step.modules = [name for name, _ in kept]
    step.forward = [cost for _, cost in kept]


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Run one training step of `model`; `loss()` runs the forward pass and the loss."""
    step, recorder, saved = Step(), Recorder(), Saved(model)
    handles = add_forward_hooks(model, step, recorder) + add_ready_hooks(model, step, recorder)
    with torch.device("meta"), cuda_kernels(), recorder:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            result = loss()
        step.forward.append(recorder.cut())
        torch.autograd.backward(result)
        step.backward.append(recorder.cut())
    for handle in handles:
        handle.remove()
    model.zero_grad(set_to_none=True)
    step.saved_bytes = saved.nbytes()
    drop_idle(step)
    return step


@dataclass(frozen=True)
class Size:
    """What the user may choose: the JSON entry, and the sizes to measure at.

    `points` are used for the fit (one more than the degree in x), `check` is held out.
    """

    entry: dict[str, Any]
    points: tuple[int, ...]
    check: int

    def x(self, size: int) -> int:
        """The variable of the cost polynomials: pixels, tokens per sample, or a constant."""
        return size * size if self.entry["variable"] == "pixels" else size

    @property
    def default(self) -> int:
        """The default size, in image side length or tokens."""
        return int(self.entry["default"])


@dataclass(frozen=True)
class Spec:
    """How to build one zoo model and its loss."""

    name: str
    title: str
    family: str
    library: str
    call: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Callable[[], Tensor]]
    size: Size


def image_loss(model: nn.Module, batch: int, size: int) -> Callable[[], Tensor]:
    """Cross entropy of `batch` square RGB images with side `size` pixels."""
    images = torch.empty(batch, 3, size, size, device="meta")
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    return lambda: functional.cross_entropy(model(images), labels)


def token_loss(model: nn.Module, batch: int, size: int) -> Callable[[], Tensor]:
    """The model's own loss for `batch` sequences of `size` tokens, every token labelled."""
    ids = torch.empty(batch, size, dtype=torch.long, device="meta")
    arguments = {"input_ids": ids, "labels": ids}
    if type(model).__name__ == "BertForPreTraining":
        arguments["next_sentence_label"] = torch.empty(batch, dtype=torch.long, device="meta")

    def run() -> Tensor:
        loss: Tensor = model(**arguments).loss
        return loss

    return run


def import_torchvision() -> Any:
    """torchvision, also when its compiled operators cannot be loaded.

    The import registers shape functions for two of these operators, and fails where a torchvision
    built for another torch (CPU against CUDA) could not define them. No zoo model uses them.
    """
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    return import_module("torchvision")


def import_transformers() -> Any:
    """transformers, which imports torchvision wherever that is installed."""
    with suppress(ModuleNotFoundError):
        import_torchvision()
    return import_module("transformers")


def vision(name: str, title: str, size: Size) -> Spec:
    """A torchvision model with the default arguments."""

    def build() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)()
        return model

    return Spec(name, title, "vision", "torchvision", f"{name}()", build, image_loss, size)


def language(name: str, title: str, architecture: str, config: dict[str, Any], size: Size) -> Spec:
    """A transformers model built from a configuration, with fused attention."""

    def build() -> nn.Module:
        library = import_transformers()
        # GPT-2 logs that its class names no loss and that it takes the causal one, as it should.
        library.logging.set_verbosity_error()
        kind = getattr(library, architecture)
        model: nn.Module = kind(kind.config_class(**config, attn_implementation="sdpa"))
        return model

    arguments = ", ".join(f"{key}={value}" for key, value in config.items() if key != "use_cache")
    call = f"{architecture}({arguments})"
    return Spec(name, title, "language", "transformers", call, build, token_loss, size)


def entry(key: str, default: int, variable: str, step: int, bounds: tuple[int, int | None]) -> Any:
    """The "size" object of the JSON format."""
    names = ("key", "default", "variable", "multiple_of", "min", "max")
    return dict(zip(names, (key, default, variable, step, *bounds), strict=True))


def tokens(default: int, longest: int) -> Size:
    """Sequence length in tokens; costs are quadratic in it."""
    return Size(entry("seq_len", default, "seq_len", 1, (8, longest)), (24, 61, 160), 200)


PIXELS = Size(entry("image_size", 224, "pixels", 32, (64, None)), (64, 160), 288)
FIXED = Size(entry("image_size", 224, "none", 224, (224, 224)), (224,), 224)

BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}

# https://huggingface.co/meta-llama/Llama-3.2-1B config.json
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "use_cache": False,
}


def bert(name: str, title: str, config: dict[str, Any]) -> Spec:
    """A BERT with both pre-training heads; the library's defaults are the uncased base model."""
    return language(name, title, "BertForPreTraining", config, tokens(512, 512))


def gpt2(name: str, title: str, width: int, layers: int, heads: int) -> Spec:
    """A GPT-2 of the given hidden size and depth."""
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "use_cache": False}
    return language(name, title, "GPT2LMHeadModel", config, tokens(1024, 1024))


ZOO: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        vision("resnet18", "ResNet-18 (torchvision)", PIXELS),
        vision("resnet34", "ResNet-34 (torchvision)", PIXELS),
        vision("resnet50", "ResNet-50 (torchvision)", PIXELS),
        vision("resnet101", "ResNet-101 (torchvision)", PIXELS),
        vision("resnet152", "ResNet-152 (torchvision)", PIXELS),
        vision("resnext50_32x4d", "ResNeXt-50 32x4d (torchvision)", PIXELS),
        vision("resnext101_32x8d", "ResNeXt-101 32x8d (torchvision)", PIXELS),
        vision("vgg16", "VGG-16 (torchvision)", PIXELS),
        vision("vit_b_16", "ViT-B/16 (torchvision)", FIXED),
        vision("vit_l_16", "ViT-L/16 (torchvision)", FIXED),
        bert("bert-base", "BERT base (transformers)", {}),
        bert("bert-large", "BERT large (transformers)", BERT_LARGE),
        gpt2("gpt2", "GPT-2 124M (transformers)", 768, 12, 12),
        gpt2("gpt2-medium", "GPT-2 medium 355M (transformers)", 1024, 24, 16),
        gpt2("gpt2-large", "GPT-2 large 774M (transformers)", 1280, 36, 20),
        gpt2("gpt2-xl", "GPT-2 XL 1.5B (transformers)", 1600, 48, 25),
        language(
            "llama-1b",
            "Llama 3.2 1B (transformers)",
            "LlamaForCausalLM",
            LLAMA_1B,
            tokens(2048, 131072),
        ),
    )
}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter as DDP sees them: registration order, tied weights once."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def dtype_column(group: Iterable[Tensor]) -> Any:
    """The dtypes as a list of names, or one name if they are all equal."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in group]
    return names[0] if len(set(names)) == 1 else names


def tensor_columns(named: dict[str, Any]) -> dict[str, Any]:
    """Name, shape and dtype columns of named tensors."""
    shapes = [list(tensor.shape) for tensor in named.values()]
    return {"name": list(named), "shape": shapes, "dtype": dtype_column(named.values())}


def parameter_columns(model: nn.Module) -> dict[str, Any]:
    """The "parameters" object: tensor columns and the class of the owning module."""
    named = trained_parameters(model)
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in named]
    return {**tensor_columns(named), "module": owners}


def evaluate(coefficients: Sequence[Fraction], x: int) -> Fraction:
    """Value of a polynomial with ascending coefficients at x."""
    return sum((value * x**power for power, value in enumerate(coefficients)), Fraction(0))


def interpolate(points: Sequence[tuple[int, Fraction]]) -> list[Fraction]:
    """Ascending coefficients of the polynomial through all points (Newton's form)."""
    result = [Fraction(0)] * len(points)
    basis = [Fraction(1)]
    for x, y in points:
        scale = (y - evaluate(result, x)) / evaluate(basis, x)
        for power, value in enumerate(basis):
            result[power] += scale * value
        shifted, scaled = [Fraction(0), *basis], [*(-x * value for value in basis), Fraction(0)]
        basis = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return result


@dataclass(frozen=True)
class Fit:
    """fixed(x) + batch * slope(x): two polynomials with ascending exact coefficients."""

    fixed: list[Fraction]
    slope: list[Fraction]

    def at(self, batch: int, x: int) -> Fraction:
        """The value at a batch size and x."""
        return evaluate(self.fixed, x) + batch * evaluate(self.slope, x)

    def folded(self, x: int) -> Fit:
        """The format's form: the batch-independent part frozen at one x."""
        return Fit([evaluate(self.fixed, x)], self.slope)


Steps = dict[tuple[int, int], Step]
Fits = dict[str, list[Fit]]
FIT_BATCHES = (2, 3)
CHECK_BATCH = 5


def fit(grid: dict[tuple[int, int], int]) -> Fit:
    """The exact fit through values at (batch, x), two batch sizes at each x."""
    low, high = FIT_BATCHES
    fixed, slope = [], []
    for x in sorted({x for _, x in grid}):
        per_sample = Fraction(grid[high, x] - grid[low, x], high - low)
        slope.append((x, per_sample))
        fixed.append((x, grid[low, x] - low * per_sample))
    return Fit(interpolate(fixed), interpolate(slope))


def fit_columns(steps: Steps) -> Fits:
    """Fit every segment of every column; steps at (batch, x)."""
    grids = {point: step.values() for point, step in steps.items()}
    first = next(iter(grids.values()))
    return {
        column: [
            fit({point: values[column][row] for point, values in grids.items()})
            for row in range(len(first[column]))
        ]
        for column in first
    }


def error(fits: Fits, step: Step, batch: int, x: int) -> tuple[float, float]:
    """Largest relative error of any one segment's value, and of any column's total."""

    def relative(predicted: Fraction, measured: int) -> float:
        return float(abs(predicted - measured) / max(measured, 1))

    segment = total = 0.0
    for column, values in step.values().items():
        predicted = [one.at(batch, x) for one in fits[column]]
        segment = max(segment, *map(relative, predicted, values))
        total = max(total, relative(sum(predicted, Fraction(0)), sum(values)))
    return segment, total


def number(value: Fraction) -> int | float:
    """An integer if integral, else the float that is exactly equal."""
    if value.denominator == 1:
        return value.numerator
    if Fraction(float(value)) != value:
        raise ValueError(f"{value} is not exact in binary")
    return float(value)


def coefficients(fits: list[Fit]) -> dict[str, list[int | float]]:
    """The fixed, c0, c1 and c2 columns of folded fits; all-zero columns are left out."""
    columns = {"fixed": [number(one.fixed[0]) for one in fits]}
    for power in range(len(fits[0].slope)):
        columns[f"c{power}"] = [number(one.slope[power]) for one in fits]
    return {name: values for name, values in columns.items() if any(values)}


def phase_columns(phase: str, segments: list[Cost], fits: Fits) -> dict[str, Any]:
    """The cost columns of the "forward" or "backward" object."""
    costs = {cost: coefficients(fits[f"{phase}.{cost}"]) for cost in COSTS}
    return {**costs, "kernels": [segment.kernels for segment in segments]}


def source(spec: Spec) -> str:
    """Where the numbers come from, with versions."""
    version = import_module(spec.library).__version__.partition("+")[0]
    torch_version = torch.__version__.partition("+")[0]
    return (
        f"{spec.library} {version} {spec.call} on the meta device, torch {torch_version}; "
        "FLOPs by torch.utils.flop_counter"
    )


@dataclass(frozen=True)
class Table:
    """The JSON object of one model, and how exact its polynomials are."""

    content: dict[str, Any]
    exactness: str


def measure_all(
    spec: Spec, model: nn.Module, batches: Iterable[int], sizes: Iterable[int]
) -> Steps:
    """Steps at every (batch, x) of a grid; the same operators must run in all of them."""
    grid = [(batch, size) for size in sizes for batch in batches]
    steps = {
        (batch, spec.size.x(size)): measure(model, spec.loss(model, batch, size))
        for batch, size in grid
    }
    first, *others = steps.values()
    if any(step.structure() != first.structure() for step in others):
        raise RuntimeError(f"{spec.name}: the operators depend on the batch or the size")
    return steps


def check(spec: Spec, model: nn.Module, fits: Fits, folded: Fits) -> str:
    """Compare with steps that the fit has not seen; say how exact the folded form is."""
    steps = measure_all(spec, model, [CHECK_BATCH], {spec.size.default, spec.size.check})
    for (batch, x), step in steps.items():
        if error(fits, step, batch, x) != (0.0, 0.0):
            raise RuntimeError(f"{spec.name}: no exact polynomial at batch {batch}, x {x}")
    batch, x = CHECK_BATCH, spec.size.x(spec.size.check)
    segment, total = error(folded, steps[batch, x], batch, x)
    if segment == 0.0:
        return "exact"
    where = f"batch {batch} and {spec.size.entry['key']} {spec.size.check}"
    errors = f"totals within {total:.2g}, segments within {segment:.2g}"
    return f"exact at the default size; at {where} {errors}"


def make_table(spec: Spec) -> Table:
    """Measure one model."""
    with torch.device("meta"):
        model = spec.build().train()
    steps = measure_all(spec, model, FIT_BATCHES, spec.size.points)
    step = next(iter(steps.values()))
    fits = fit_columns(steps)
    default = spec.size.x(spec.size.default)
    folded = {column: [one.folded(default) for one in rows] for column, rows in fits.items()}
    saved = {key: values[0] for key, values in coefficients(folded["saved_bytes"]).items()}
    content = {
        "schema": SCHEMA,
        "name": spec.name,
        "title": spec.title,
        "family": spec.family,
        "source": source(spec),
        "parameter_count": sum(tensor.numel() for tensor in trained_parameters(model).values()),
        "size": spec.size.entry,
        "parameters": parameter_columns(model),
        "buffers": tensor_columns(dict(model.named_buffers())),
        "ready_order": step.ready,
        "forward": {"module": step.modules, **phase_columns("forward", step.forward, folded)},
        "backward": phase_columns("backward", step.backward, folded),
        "saved_bytes": saved,
    }
    return Table(content, check(spec, model, fits, folded))


def render(value: Any, indent: str = "") -> str:
    """JSON text with one line per key and every array on one line."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    inner = indent + "  "
    lines = [f"{inner}{json.dumps(key)}: {render(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}" if lines else "{}"


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate the named tables, or all; one line is printed per model."""
    parser = argparse.ArgumentParser(description="Measure zoo models and write their tables.")
    parser.add_argument("name", nargs="*", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder to write to")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in ZOO]
    if unknown:
        parser.error(f"unknown model: {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.name or ZOO:
        start = time.perf_counter()
        table = make_table(ZOO[name])
        text = render(table.content) + "\n"
        write(options.out / f"{name}.json", text)
        seconds = time.perf_counter() - start
        print(f"{name}: {len(text)} bytes, {seconds:.1f} s, {table.exactness}", flush=True)


if __name__ == "__main__":
    main()
