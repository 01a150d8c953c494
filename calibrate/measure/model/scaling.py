"""A profile carried to another device, by what both reach."""

from __future__ import annotations

from calibrate.measure.errors import MeasureError
from calibrate.measure.model.document import Document
from ddpsim.scenario.catalog import are_other_devices, device_table, resolve
from ddpsim.scenario.options.model_file import LATER


def scale_ends(text: str) -> tuple[str, str]:
    """The device presets of FROM:TO; raises MeasureError for what is none."""
    names = text.split(":")
    if len(names) != 2:
        raise MeasureError(f"--scale {text!r}: wanted FROM:TO, two device presets")
    try:
        old, new = (resolve("device", name) for name in names)
    except ValueError as error:
        raise MeasureError(f"--scale {text!r}: {error}") from None
    return old, new


def check_scaled_from(measured_on: str | None, old: str) -> None:
    """Raise MeasureError where a profile was measured on another device than it is scaled from."""
    if are_other_devices(measured_on, old):
        raise MeasureError(
            f"--scale is from {old}, but this is measured on {measured_on}: name that one"
        )


def scale_profile(document: Document, old: str, new: str) -> Document:
    """A profile for another device preset: an estimate, as its `source` and `scaled_to` say.

    Forward, backward and ready times are scaled by the presets' fp32 matmul rates times their
    assumed efficiency, the optimizer by their memory bandwidth likewise. Raises MeasureError where
    it was measured on another than `old`.
    """
    measured = document["measured"]
    check_scaled_from(measured.get("device"), old)
    compute = _matmul_rate(old) / _matmul_rate(new)
    memory = _memory_rate(old) / _memory_rate(new)
    by_memory = f" (by memory it would be {memory:.3g})"
    source = (
        f"ESTIMATE, not measured: {measured['source']}; scaled from {old} to {new}, forward and "
        f"backward x {compute:.3g}{by_memory}, optimizer x {memory:.3g}"
    )
    scaled = {
        "source": source,
        "scaled_to": new,
        "forward_s": measured["forward_s"] * compute,
        "backward_s": measured["backward_s"] * compute,
        "optimizer_s": measured["optimizer_s"] * memory,
        **{key: measured[key] * compute for key in LATER if key in measured},
        "with_ddp_s": None,  # copies scale by other rates than compute
        "interference_exponent": None,
        "ready_s": [ready_s and ready_s * compute for ready_s in measured["ready_s"]],
        "ddp_hook_s": None,
    }
    return document | {"measured": measured | scaled}


def _matmul_rate(device: str) -> float:
    table = device_table(device)
    return float(table["peak_flops"]["fp32"] * table["matmul_efficiency"]["fp32"])


def _memory_rate(device: str) -> float:
    table = device_table(device)
    return float(table["memory_bandwidth_bytes_per_s"] * table["memory_efficiency"])
