"""Model profiles and parameter lists, in JSON and CSV."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from logs.measured_files import PROFILE, Write, measured

from ddpsim.errors import ImportFailedError
from ddpsim.importers.profiles.model import read_parameters, read_profile
from ddpsim.scenario.options import model_file
from ddpsim.workload.model import ITEM_BYTES, Buffer


def test_json_profile(write: Write) -> None:
    profile = read_profile(write(json.dumps(PROFILE), "profile.json"))
    assert profile.in_registration_order
    assert profile.ready_origin == "backward_start"
    assert (profile.forward_s, profile.backward_s, profile.optimizer_s) == (0.001, 0.002, 0.0001)
    assert profile.batch_per_rank == 8
    assert profile.buffers == (("bool", 4),)
    assert [
        (p.name, p.numel, p.dtype, p.ready_s, p.sparse, p.shape) for p in profile.parameters
    ] == [
        ("a.weight", 100, "float32", 0.002, False, (10, 10)),
        ("a.bias", 10, "bfloat16", 0.0015, False, None),
        ("unused", 1, "float32", None, True, ()),
    ]
    silent = {key: value for key, value in PROFILE.items() if key != "buffers"}
    assert read_profile(write(json.dumps(silent), "p.json")).buffers == ()


LATER = {"later_forward_s": 0.0009, "later_backward_s": 0.0025}


@pytest.mark.parametrize(
    ("told", "key", "read"),
    [
        ({"scaled_to": "a100-sxm-40gb"}, "scaled_to", "a100-sxm-40gb"),
        ({"iterations_s": [[0.1, 0.2], [0.3, 0.4]]}, "iterations_s", ((0.1, 0.2), (0.3, 0.4))),
        (LATER, "later_backward_s", 0.0025),
        ({"sigma": 0}, "sigma", 0),
        ({"sigma": None}, "sigma", None),
        ({"with_ddp_s": 1.0}, "with_ddp_s", 1.0),
        ({"interference_exponent": 1.1}, "interference_exponent", (1.1, 0.0)),
        (
            {"interference_exponent": 0.04, "interference_exponent_stderr": 0.06},
            "interference_exponent",
            (0.04, 0.06),
        ),
        ({"backward_s": 0.002 / 1.04}, "backward_s", 0.002 / 1.04),  # medians need not add up
    ],
)
def test_what_may_be_known(told: dict[str, Any], key: str, read: object, write: Write) -> None:
    assert getattr(read_profile(write(measured(**told), "p.json")), key) == read


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"backward_s": 0.002 / 1.06},
            "ready_s has 0.002, but the whole backward takes 0.0018",
        ),
        ({"device": ""}, "measured.device: "),
        ({"optimizer": 4}, "measured.optimizer: wanted text, in quotes, got 4"),
        ({"later_forward_s": 0.1}, "one of later_forward_s and later_backward_s stands alone"),
        (LATER | {"later_forward_s": 0}, "measured.later_forward_s: 0 is out of range"),
        ({"with_ddp_s": 1e-4}, "with_ddp_s is 0.0001, but the step without DDP takes 0.0031"),
        ({"interference_exponent": 11}, "interference_exponent: 11 is out of range"),
        ({"ddp_hook_s": [True, None, None]}, "measured.ddp_hook_s.0: wanted a number, got true"),
        ({"ddp_hook_s": [None]}, "measured.ddp_hook_s: 1 entries, wanted 3"),
        ({"sigma": 1.5}, "measured.sigma: 1.5 is out of range: wanted at most 1"),
        ({"iterations_s": [[0.1], [0.1, 0.2]]}, "a number for each rank in every iteration"),
        ({"iterations_s": [[]]}, "wanted a number for each rank in every iteration"),
        ({"iterations_s": [[0.0]]}, "measured.iterations_s.0.0: 0.0 is out of range"),
        ({"warnings": "text"}, "measured.warnings: wanted a list, got 'text'"),
    ],
)
def test_what_nobody_can_have_measured(told: dict[str, Any], said: str, write: Write) -> None:
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_profile(write(measured(**told), "p.json"))


def test_a_profile_needs_each_key(write: Write) -> None:
    for key in PROFILE["measured"]:
        lacking = {name: value for name, value in PROFILE["measured"].items() if name != key}
        with pytest.raises(ImportFailedError, match=f"measured.{key}: is missing"):
            read_profile(write(json.dumps(PROFILE | {"measured": lacking}), "profile.json"))
    with pytest.raises(ImportFailedError, match="nothing is captured or measured of the model"):
        read_profile(write(json.dumps(PROFILE | {"measured": None}), "profile.json"))


def test_csv_profile_is_a_backward_list(write: Write) -> None:
    text = "order,param_name,numel,ready_us\n0,fc.bias,10,0\n1,fc.weight,1000,12.5\n"
    profile = read_profile(write(text, "profile.csv"))
    assert not profile.in_registration_order
    assert profile.ready_origin is None
    assert profile.forward_s is None
    assert [(p.name, p.numel, p.ready_s) for p in profile.parameters] == [
        ("fc.bias", 10, 0.0),
        ("fc.weight", 1000, pytest.approx(12.5e-6)),
    ]


def test_parameter_list(write: Write) -> None:
    text = "name,shape,dtype\nw,512x3x7x7,float32\nb,512,torch.float16\nt,2X2,float64\n"
    found = read_parameters(write(text, "parameters.csv")).parameters
    assert [(p.name, p.numel, p.dtype, p.dimensions, p.ready_s) for p in found] == [
        ("w", 512 * 3 * 49, "float32", 4, None),
        ("b", 512, "float16", 1, None),
        ("t", 4, "float64", 2, None),
    ]


@pytest.mark.parametrize("dtype", ["int64", "torch.uint8", "bool"])
def test_a_parameter_of_integers_gets_no_gradient(write: Write, dtype: str) -> None:
    said = f"{dtype!r} is no dtype of a parameter that gets a gradient; list those alone, wanted"
    with pytest.raises(ImportFailedError, match=f"list.csv:3: {said}"):
        read_parameters(write(f"name,shape,dtype\nw,2,float32\nids,2,{dtype}\n", "list.csv"))
    parameters = PROFILE["parameters"] | {"dtype": dtype.removeprefix("torch.")}
    with pytest.raises(ImportFailedError, match="is no dtype of a parameter that gets a gradient"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))


def test_a_profile_names_each_parameter_once(write: Write) -> None:
    parameters = PROFILE["parameters"] | {"name": ["a", "b", "a"]}
    with pytest.raises(ImportFailedError, match=r"p\.json: .* lists 'a' twice; a parameter"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))
    with pytest.raises(ImportFailedError, match=r"p\.csv: lists 'a' twice; a parameter"):
        read_profile(write("param_name,numel,ready_us\na,4,1\na,4,2\n", "p.csv"))


def test_the_bytes_of_every_buffer_that_is_read_are_known(write: Write) -> None:
    kinds = ["complex64", "complex128", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint64"]
    buffers = {"name": kinds, "shape": [4] * len(kinds), "dtype": kinds}
    read = read_profile(write(json.dumps(PROFILE | {"buffers": buffers}), "p.json")).buffers
    assert [Buffer(*each).size_bytes for each in read] == [32, 64, 4, 4, 8, 32]
    assert ITEM_BYTES.keys() == set(model_file._DTYPES)


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        ("(512, 3)", (512 * 3, 2)),
        ('"(512, 3)"', (512 * 3, 2)),
        ("torch.Size([512, 3])", (512 * 3, 2)),
        ("(512,)", (512, 1)),
        ("()", (1, 0)),
        ("torch.Size([])", (1, 0)),
    ],
)
def test_shapes_as_torch_prints_them(write: Write, shape: str, extents: tuple[int, int]) -> None:
    text = f"# from named_parameters()\nname,shape,dtype\nw,{shape},torch.float32\n"
    (found,) = read_parameters(write(text)).parameters
    assert (found.name, found.dtype) == ("w", "float32")
    assert (found.numel, found.dimensions) == extents


def test_an_error_below_comments_names_its_line(write: Write) -> None:
    with pytest.raises(ImportFailedError) as caught:
        read_parameters(write("# a\n\nname,shape,dtype\nw,(0, 5),float32\n"))
    assert caught.value.line == 4


def test_a_parameter_has_one_row(write: Write) -> None:
    rows = "name,shape,dtype\nw,4x4,float32\nb,4,float32\nw,8,float32\n"
    said = "file.txt:4: 'w' stands in line 2 already; a parameter has one row, shared ones too"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_parameters(write(rows))
