"""What calibrate does on a real GPU; left out where torch sees none.

The same code runs call by call with a stand-in in test_cuda_paths.py. Here the GPU itself is the
oracle: its events, its memory, its types.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
from measured.measuring import recorded

from calibrate.fit.device.fit import fit_device
from calibrate.measure.cluster.plan import Options
from calibrate.measure.device.session import DeviceOptions, measure_device
from calibrate.measure.model.profile import ProfileOptions, profile
from calibrate.records.device_record import Case, DeviceRecord

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
SMALL = ("launch", "operator"), ("launch", "step"), ("launch", "kernel"), ("launch", "graph")
RESNET = Case(kind="step", model="resnet18", precision="fp32", batch=16, size=224)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> DeviceRecord:
    plan = [Case(kind=kind, variant=variant) for kind, variant in SMALL]
    plan += [
        Case(kind="product", shape=(2048, 2048, 2048)),
        Case(kind="product", precision="fp16", shape=(2048, 2048, 2048)),
        Case(kind="convolution", precision="fp16", shape=(16, 64, 56, 64, 3, 1, 1)),
        Case(kind="memory", variant="copy", shape=(2**25,)),
        Case(kind="optimizer", variant="sgd foreach", shape=(16, 2**16)),
        RESNET,
        RESNET.model_copy(update={"precision": "amp-fp16", "channels_last": True}),
        RESNET.model_copy(update={"batch": 1, "size": 64}),
        Case(kind="ddp", model="resnet18", batch=16, size=224),
        Case(kind="grad_scaler", model="resnet18", precision="amp-fp16", batch=16, size=224),
        Case(kind="sync_batch_norm", shape=(16, 64, 56)),
    ]
    path = tmp_path_factory.mktemp("gpu") / "record.json"
    return measure_device(DeviceOptions(path, 120, rounds=1, plan=plan))


def test_every_case_is_measured(record: DeviceRecord) -> None:
    assert record.skipped == {}
    assert all(min(s) > 0 for m in record.measurements for s in m.samples_s.values())


def test_a_step_holds_at_least_its_weights_gradients_and_images(record: DeviceRecord) -> None:
    measured = record.find(RESNET)
    assert measured is not None
    assert measured.peak_bytes is not None
    assert 2 * 4 * 11_689_512 < measured.peak_bytes < record.memory_bytes
    ready = [part for part in measured.ready if part is not None]
    assert len(ready) == 62
    assert ready[-1] == min(ready)  # the last layer's gradient is the first


def test_half_products_are_not_slower(record: DeviceRecord) -> None:
    whole, half = (m.best_s() for m in record.of("product"))
    assert half <= whole


def test_its_device_file_predicts_a_step(record: DeviceRecord) -> None:
    fitted = fit_device(record, None, "record.json").file
    assert fitted.kind == "gpu"
    assert fitted.launch_s > 0
    assert set(fitted.peak_flops) == {"fp32", "fp16"}


def test_a_model_is_profiled() -> None:
    options = ProfileOptions(
        model="calibrate.measure.zoo.models:resnet50",
        output=Path("model.json"),
        batch=8,
        iterations=3,
    )
    document = profile(options)["measured"]
    assert document["forward_s"] > 0
    assert document["peak_memory"]["of"] == "tensors on the device"
    assert "warnings" not in document


def test_one_rank_is_measured(tmp_path: Path) -> None:
    options = Options(output=tmp_path / "r.json", only=("device_copy", "optimizer", "ddp_hook"))
    record = recorded(1, options)
    assert record.environment.backend == "nccl"
    assert {m.kind for m in record.measurements} == {"device_copy", "optimizer", "ddp_hook"}
