"""The colours and hatches of a page's drawings, one for each kind of work."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's colours, which the colour-blind tell apart, and page.css's names of them
OKABE_ITO = {
    "#0072b2": "--backward",
    "#d55e00": "--exposed",
    "#009e73": "--hidden",
    "#cc79a7": "--copies",
    "#e69f00": "--optimizer",
    "#56b4e9": "--forward",
    "#000000": "--ink",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of work is drawn: colours are the style sheet's; a hatch says it without them."""

    name: str
    colour: str
    short: str = ""
    hatched: bool = False
    over: str = "--on-colour"  # the hatch's
    text: str = "--on-colour"
    edge: str = "--edge"
    low: bool = False  # a thin bar beneath


_COPIES = "copies and buffers"
_WAITING = "compute waits for communication"
_IDLE = "waits for data or for the device, or stalls"
LOOKS = {
    "forward": Look("forward", "--forward", "forward"),
    "backward": Look("backward", "--backward", "backward", text="--on-backward"),
    "bucket_copy": Look(_COPIES, "--copies"),
    "copy_back": Look(_COPIES, "--copies"),
    "buffers": Look(_COPIES, "--copies"),
    "input_copy": Look(_COPIES, "--copies"),
    "unshard": Look(_COPIES, "--copies"),
    "optimizer": Look("optimizer", "--optimizer", "optimizer"),
    "unscale": Look("optimizer", "--optimizer", "optimizer"),
    "clip": Look("optimizer", "--optimizer", "optimizer"),
    "zero_grad": Look("optimizer", "--optimizer", "optimizer"),
    "item": Look("optimizer", "--optimizer", "optimizer"),
    "averaging": Look(_COPIES, "--copies"),
    "comm_wait": Look(_WAITING, "--ground", hatched=True, over="--exposed", edge="--exposed"),
    "data_wait": Look(_IDLE, "--ground", hatched=True, over="--idle", edge="--idle"),
    "stall": Look(_IDLE, "--ground", hatched=True, over="--idle", edge="--idle"),
    "device_wait": Look(_IDLE, "--ground", hatched=True, over="--idle", edge="--idle"),
    "hidden": Look("communication, hidden under compute", "--hidden"),
    "exposed": Look(
        "communication, exposed", "--exposed", hatched=True, over="--hatch", text="--on-exposed"
    ),
    "queued": Look("bucket ready, queued behind others", "--idle", low=True),
    "late": Look("waits for late peers", "--ink", low=True),
    "ring_even": Look("ring steps (zoom in)", "--raised"),
    "ring_odd": Look("ring steps (zoom in)", "--idle"),
}
LOOK_OF_PART = {
    "forward": LOOKS["forward"],
    "backward_compute": LOOKS["backward"],
    "exposed_comm": LOOKS["exposed"],
    "optimizer": LOOKS["optimizer"],
    "data_wait": LOOKS["data_wait"],
    "other": LOOKS["bucket_copy"],
}
