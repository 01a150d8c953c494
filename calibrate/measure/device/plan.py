"""What is measured of a device, the most valuable first."""

from __future__ import annotations

from collections.abc import Iterator

from calibrate.records.device_record import Case, Kind
from ddpsim.scenario.device import Rate
from ddpsim.scenario.workload import Precision

# by family in turn, the most used first: a short budget, and either half, has some of each
IMAGE_MODELS = (
    *("resnet50", "vit_b_16", "resnet18", "vgg16", "resnext50_32x4d", "resnet101"),
    *("resnet34", "resnext101_32x8d", "resnet152", "vit_l_16"),
)
TOKEN_MODELS = (
    "gpt2",
    "bert-base",
    "bert-large",
    "gpt2-medium",
    "gpt2-large",
    "llama-1b",
    "gpt2-xl",
)
_ATTENTIVE_IMAGES = ("vit_b_16", "vit_l_16")  # of 224 x 224 alone, and without memory formats

# rows, inner, columns: linear layers of the zoo with the rows of a small and of a usual batch
_PRODUCTS = {
    False: ((64, 768, 3072), (197, 768, 768), (197, 3072, 768), (192, 1024, 4096), (512, 512, 512)),
    True: (
        *((4096, 4096, 4096), (8192, 8192, 8192), (8192, 768, 3072), (8192, 3072, 768)),
        *((4096, 1024, 4096), (2048, 2048, 8192), (1024, 1024, 1024), (8192, 1024, 50257)),
        *((512, 768, 3072), (197, 768, 768)),
    ),
}
# batch, inputs, side, outputs, kernel, stride, groups: layers of ResNet, VGG, ResNeXt and ViT
_CONVOLUTIONS = {
    False: (
        *((2, 64, 32, 64, 3, 1, 1), (2, 256, 16, 64, 1, 1, 1), (2, 128, 16, 512, 1, 1, 1)),
        *((2, 256, 8, 256, 3, 1, 1), (2, 128, 32, 128, 3, 1, 32), (1, 3, 128, 64, 7, 2, 1)),
    ),
    True: (
        *((64, 64, 56, 64, 3, 1, 1), (64, 256, 56, 64, 1, 1, 1), (64, 128, 28, 512, 1, 1, 1)),
        *((64, 256, 14, 256, 3, 1, 1), (64, 512, 7, 2048, 1, 1, 1), (64, 3, 224, 64, 7, 2, 1)),
        *((64, 128, 56, 128, 3, 1, 32), (32, 64, 224, 64, 3, 1, 1), (64, 3, 224, 768, 16, 16, 1)),
    ),
}
_MEMORY = ("copy", "add", "gelu", "layer norm", "softmax", "relu")
_ELEMENTS = {False: (2**18, 2**24), True: (2**20, 2**26)}
_OPTIMIZERS = (
    *("sgd foreach", "adamw foreach", "adamw fused", "sgd momentum foreach", "sgd fused"),
    "adam foreach",
)
_BATCH_NORMS = ((32, 64, 112), (32, 256, 56), (32, 2048, 7))  # of a ResNet-50
_TENSORS = {False: (64, 2**18), True: (160, 2**20)}
_PRECISIONS: dict[Rate, tuple[Precision, ...]] = {
    "fp32": ("fp32",),
    "tf32": ("tf32",),
    "fp16": ("amp-fp16",),
    "bf16": ("amp-bf16", "bf16"),
}
# of images and of tokens: batch and size
_CPU_STEPS = (((4, 128), (1, 160)), ((1, 64), (2, 96)))
_GPU_STEPS = (((64, 224), (16, 224), (256, 224)), ((8, 512), (2, 512), (32, 512)))
_SMALLEST = ((1, 64), (1, 8))  # whose pace the host sets


def device_plan(rates: tuple[Rate, ...], *, gpu: bool) -> Iterator[Case]:
    """The cases of a device that has units for such types, in the order of their worth."""
    yield from _kernels(rates, gpu=gpu)
    yield from _steps(_first_precisions(rates), gpu=gpu, first=True)
    if gpu:
        for name, images in _models():
            batch, size = _SMALLEST[0 if images else 1]
            side = 224 if name in _ATTENTIVE_IMAGES else size
            for precision in _first_precisions(rates):
                yield Case(kind="step", model=name, precision=precision, batch=batch, size=side)
    yield from _around(gpu=gpu)
    if gpu:
        yield from _steps(_first_precisions(rates), gpu=gpu, first=False)
        others = [p for rate in rates for p in _PRECISIONS[rate]]
        yield from _steps([p for p in others if p not in _first_precisions(rates)], gpu=gpu)
    else:
        yield from _steps(["fp32"], gpu=gpu, first=False)
    image, token = ((64, 224), (8, 512)) if gpu else ((1, 96), (1, 32))
    precision = _first_precisions(rates)[0]
    for name, (batch, size) in {"gpt2": token, "resnet50": image}.items():
        yield Case(kind="compile", model=name, precision=precision, batch=batch, size=size)


def _first_precisions(rates: tuple[Rate, ...]) -> list[Precision]:
    """What most train in: half, and fp32."""
    half: list[Precision] = (
        ["amp-bf16"] if "bf16" in rates else ["amp-fp16"] if "fp16" in rates else []
    )
    return [*half, "fp32"]


def _kernels(rates: tuple[Rate, ...], *, gpu: bool) -> Iterator[Case]:
    for variant in ("operator", "step", *(("kernel", "graph") if gpu else ())):
        yield Case(kind="launch", variant=variant)
    for rate in rates:
        yield from (Case(kind="product", precision=rate, shape=s) for s in _PRODUCTS[gpu])
    for rate in rates:
        if rate == "fp32" and "tf32" in rates:
            continue  # torch leaves convolutions of fp32 to TF32
        for shape in _CONVOLUTIONS[gpu]:
            yield Case(kind="convolution", precision=rate, shape=shape)
            if gpu:
                yield Case(kind="convolution", precision=rate, shape=shape, channels_last=True)
    for variant in _MEMORY:
        for elements in _ELEMENTS[gpu]:
            yield Case(kind="memory", variant=variant, shape=(elements,))
    for variant in _OPTIMIZERS:
        yield Case(kind="optimizer", variant=variant, shape=_TENSORS[gpu])


def _models() -> Iterator[tuple[str, bool]]:
    """Names, and whether they take images: the families take turns."""
    longest = max(len(IMAGE_MODELS), len(TOKEN_MODELS))
    for i in range(longest):
        yield from ((name, True) for name in IMAGE_MODELS[i : i + 1])
        yield from ((name, False) for name in TOKEN_MODELS[i : i + 1])


def _steps(precisions: list[Precision], *, gpu: bool, first: bool | None = None) -> Iterator[Case]:
    """Each model in each precision: of the first of its batches, of the others, or of all."""
    batches: tuple[tuple[tuple[int, int], ...], ...] = _GPU_STEPS if gpu else _CPU_STEPS
    for name, images in _models():
        sizes = batches[0 if images else 1]
        if name in _ATTENTIVE_IMAGES:  # of one size; on a core a batch would take seconds
            sizes = tuple((batch, 224) for batch, _ in sizes) if gpu else ((1, 224),)
        chosen = {True: sizes[:1], False: sizes[1:], None: sizes}[first]
        for precision in precisions:
            for batch, size in chosen:
                case = Case(kind="step", model=name, precision=precision, batch=batch, size=size)
                yield case
                # half convolutions have other kernels for channels last
                formats = gpu and images and name not in _ATTENTIVE_IMAGES
                if formats and precision != "fp32":
                    yield case.model_copy(update={"channels_last": True})


def _around(*, gpu: bool) -> Iterator[Case]:
    """What DDP, SyncBatchNorm and GradScaler add to a step."""
    image, token = ((32, 224), (8, 512)) if gpu else ((1, 96), (1, 32))
    named = {"resnet50": image, "gpt2": token}
    kinds: tuple[Kind, ...] = ("ddp", *(("grad_scaler",) if gpu else ()))
    for kind in kinds:
        precision: Precision = "amp-fp16" if kind == "grad_scaler" else "fp32"
        for name, (batch, size) in named.items():
            yield Case(kind=kind, model=name, precision=precision, batch=batch, size=size)
    if gpu:  # torch has SyncBatchNorm on GPUs alone
        for shape in _BATCH_NORMS:
            yield Case(kind="sync_batch_norm", shape=shape)
