"""`calibrate device` and `calibrate fit-device`: one GPU or CPU core, measured and fitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli_options import Output
from calibrate.files import check_outputs, name_as_text, save_json

__all__ = ["device", "fit_device"]

_LONGEST_S = 1e6  # of a budget: days


def device(
    output: Output,
    *,
    time_budget_s: Annotated[
        float, typer.Option(min=1, max=_LONGEST_S, help="Seconds for all of it.")
    ] = 480,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with a record; repeat nothing.")] = False,
) -> None:
    """Measure one GPU, or a CPU core: kernels, host time, optimizers, zoo models, DDP's own work.

    The most valuable first; the record is whole after every measurement.
    """
    from calibrate.measure.device.session import DeviceOptions, measure_device
    from calibrate.measure.errors import StoppedError

    options = DeviceOptions(output, time_budget_s, device=device, resume=resume)
    try:
        measure_device(options)
    except StoppedError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{output}: make a device file of it with `fit-device`")


def fit_device(
    record: Annotated[Path, typer.Argument(help="A record that `device` wrote.")],
    output: Output,
    name: Annotated[
        str | None, typer.Option(help="What to call the device; default: as torch calls it.")
    ] = None,
) -> None:
    """Fit the efficiencies of a device from its record; write a file for cluster.device."""
    from calibrate.fit.device.fit import fit_device as fitted_device
    from calibrate.fit.device.fit import residual_lines
    from calibrate.records.device_record import load_device_record
    from ddpsim.scenario.device import DEVICE_SCHEMA

    check_outputs([(output, DEVICE_SCHEMA)], [record])
    loaded = load_device_record(record)
    fitted = fitted_device(loaded, name, name_as_text(record))
    save_json(fitted.file, output)
    print(f"{output}: use it as cluster.device")
    for line in residual_lines(loaded, fitted):
        print(line)
