"""`calibrate device` and `fit-device`: one device, measured and fitted; `calibrate capture`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli_options import LONGEST_S, Output, said_once
from calibrate.files import check_outputs, name_as_text, save_json
from ddpsim.files import write_atomically


def device(
    output: Output,
    *,
    time_budget_s: Annotated[
        float, typer.Option(min=1, max=LONGEST_S, help="Seconds for all of it.")
    ] = 480,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with a record; repeat nothing.")] = False,
) -> None:
    """Measure one GPU, or a CPU core: kernels, host time, optimizers, zoo models, DDP's own work.

    The most valuable first; the record is whole after every measurement.
    """
    from calibrate.measure.device.session import DeviceOptions, measure_device

    with said_once():
        measure_device(DeviceOptions(output, time_budget_s, device=device, resume=resume))
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


def capture(
    model: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Returns (model, inputs, loss).")
    ],
    output: Output,
    *,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The batch, where the model allows one alone.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="The largest seq_len, or the usual image_size of the function."),
    ] = None,
) -> None:
    """Record a model's training step from its code, with no GPU and in little memory.

    Shapes flow through the real modules; batch and size stay free where the model allows it.
    """
    from calibrate.capture.capture import capture as captured
    from calibrate.capture.capture import render
    from calibrate.capture.sources import source_of
    from calibrate.measure.model.profile import with_other_part
    from ddpsim.scenario.options.model_file import MODEL_SCHEMA

    check_outputs([(output, MODEL_SCHEMA)])
    document = with_other_part(captured(source_of(model, batch, size)), output)
    write_atomically(output, render(document) + "\n")
    only, sizes = (document["captured"][key] for key in ("batch", "size"))
    free = "any batch" if only is None else f"a batch of {only['only']} ({only['because']})"
    print(f"{output}: use it as workload.model, with {free}")
    if sizes and sizes["min"] < sizes["max"]:
        print(f"{sizes['key']} from {sizes['min']} to {sizes['max']}")
    elif sizes:
        print(f"{sizes['key']} {sizes['default']} alone: {sizes['because']}")
