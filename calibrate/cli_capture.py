"""`calibrate capture`: a model recorded from its code, on any machine."""

from __future__ import annotations

from typing import Annotated

import typer

from calibrate.cli_options import Output
from calibrate.files import check_outputs
from ddpsim.files import write_atomically

__all__ = ["capture"]


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
    from calibrate.capture.document import render
    from calibrate.capture.named import source_of
    from calibrate.measure.model.document import with_other_part
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
