"""Model profiles and parameter lists, in JSON and CSV."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from logs.measured_files import PROFILE, Write

from ddpsim.errors import ImportFailedError
from ddpsim.importers.profiles import model
from ddpsim.importers.profiles.model import read_parameters, read_profile
from ddpsim.scenario.quantity import SourceFile
from ddpsim.workload.model import ITEM_BYTES, Buffer


def test_json_profile(write: Write) -> None:
    profile = read_profile(write(json.dumps(PROFILE), "profile.json"))
    assert profile.in_registration_order
    assert profile.ready_origin == "backward_start"
    assert (profile.forward_s, profile.backward_s, profile.optimizer_s) == (0.001, 0.002, 0.0001)
    assert profile.batch_per_rank == 8
    assert profile.buffers == (("bool", 4),)
    assert [(p.name, p.numel, p.dtype, p.ready_s, p.sparse) for p in profile.parameters] == [
        ("a.weight", 100, "float32", 0.002, False),
        ("a.bias", 10, "bfloat16", 0.0015, False),
        ("unused", 1, "float32", None, True),
    ]


def test_a_model_without_buffers_needs_no_word_of_them(write: Write) -> None:
    silent = {key: value for key, value in PROFILE.items() if key != "buffers"}
    assert read_profile(write(json.dumps(silent), "p.json")).buffers == ()


def test_gradients_that_come_after_the_backward_are_of_another_unit(write: Write) -> None:
    """Medians, each taken on its own, need not add up: 5 % later are none."""
    for backward_s in (0.002 / 1.04, 0.002 / 1.06):
        path = write(json.dumps(PROFILE | {"backward_s": backward_s}), "p.json")
        if backward_s > 0.0019:
            assert read_profile(path).backward_s == backward_s
            continue
        said = "ready_s of 'a.weight' is 0.002, but the whole backward takes 0.00188679; wanted sec"
        with pytest.raises(ImportFailedError, match=re.escape(said)):
            read_profile(path)


def test_a_scaled_profile_is_no_measurement(write: Write) -> None:
    scaled = PROFILE | {"scaled_to": "a100-sxm-40gb"}
    assert read_profile(write(json.dumps(scaled), "p.json")).scaled_to == "a100-sxm-40gb"
    assert read_profile(write(json.dumps(PROFILE), "p.json")).scaled_to is None


@pytest.mark.parametrize("key", ["device", "optimizer", "scaled_to"])
@pytest.mark.parametrize("value", ["", 4])
def test_what_a_profile_was_measured_with_is_a_name(write: Write, key: str, value: object) -> None:
    with pytest.raises(ImportFailedError, match=f"{key} is {value!r}; wanted a name"):
        read_profile(write(json.dumps(PROFILE | {key: value}), "p.json"))


def test_iterations_tell_their_spread(write: Write) -> None:
    known = PROFILE | {"iterations_s": [[0.1, 0.2], [0.3, 0.4]]}
    assert read_profile(write(json.dumps(known), "p.json")).iterations_s == ((0.1, 0.2), (0.3, 0.4))


def test_a_later_micro_batch_may_be_known(write: Write) -> None:
    later = {"later_forward_s": 0.0009, "later_backward_s": 0.0025}
    profile = read_profile(write(json.dumps(PROFILE | later), "p.json"))
    assert (profile.later_forward_s, profile.later_backward_s) == (0.0009, 0.0025)
    assert read_profile(write(json.dumps(PROFILE), "p.json")).later_backward_s is None
    for key, seconds in later.items():
        half = PROFILE | {key: seconds}
        with pytest.raises(ImportFailedError, match=f"{key} stands alone; wanted later_forward_s "):
            read_profile(write(json.dumps(half), "p.json"))
        with pytest.raises(ImportFailedError, match=key):
            read_profile(write(json.dumps(PROFILE | later | {key: 0}), "p.json"))


@pytest.mark.parametrize("sigma", [0, 0.004, 1])
def test_how_far_times_may_be_off_is_stated_or_unknown(write: Write, sigma: float) -> None:
    assert read_profile(write(json.dumps(PROFILE | {"sigma": sigma}), "p.json")).sigma == sigma
    for unknown in (PROFILE, PROFILE | {"sigma": None}):
        assert read_profile(write(json.dumps(unknown), "p.json")).sigma is None


def test_the_step_with_ddp_is_longer_or_unknown(write: Write) -> None:
    known = PROFILE | {"with_ddp_s": 1.0}
    assert read_profile(write(json.dumps(known), "p.json")).with_ddp_s == 1.0
    assert read_profile(write(json.dumps(PROFILE), "p.json")).with_ddp_s is None
    for wrong in (0, -1, "x", 1e-4):
        with pytest.raises(ImportFailedError, match="with_ddp_s is"):
            read_profile(write(json.dumps(PROFILE | {"with_ddp_s": wrong}), "p.json"))


def test_how_a_model_fares_beside_all_reduces_may_be_known(write: Write) -> None:
    def read(**more: Any) -> Any:
        return read_profile(write(json.dumps(PROFILE | more), "p.json")).interference_exponent

    assert read(interference_exponent=0.8, interference_exponent_stderr=0.04) == (0.8, 0.04)
    assert read(interference_exponent=1.1) == (1.1, 0.0)
    assert read() is None
    assert read(interference_exponent=None) is None
    for wrong in (
        {"interference_exponent": -1},
        {"interference_exponent": 11},
        {"interference_exponent": "x"},
    ):
        with pytest.raises(ImportFailedError, match="interference_exponent is"):
            read(**wrong)
    assert read(interference_exponent=0.04, interference_exponent_stderr=0.06) == (0.04, 0.06)
    with pytest.raises(ImportFailedError, match="exponent_stderr is 11; wanted at most 10"):
        read(interference_exponent=1, interference_exponent_stderr=11)


def test_a_hook_of_ddp_may_be_known(write: Write) -> None:
    first, *others = PROFILE["parameters"]

    def with_hook(seconds: Any) -> SourceFile:
        parameters = [first | {"ddp_hook_s": seconds}, *others]
        return write(json.dumps(PROFILE | {"parameters": parameters}), "p.json")

    for known in (0, 2e-5, None):
        hooks = [p.ddp_hook_s for p in read_profile(with_hook(known)).parameters]
        assert hooks == [known, *(None for _ in others)]
    for wrong in (-1e-6, "x", True):
        with pytest.raises(ImportFailedError, match=f"ddp_hook_s of {first['name']!r} is"):
            read_profile(with_hook(wrong))


def test_a_parameter_may_tell_its_rows(write: Write) -> None:
    first, *others = PROFILE["parameters"]  # of 100 elements

    def with_rows(rows: Any) -> SourceFile:
        parameters = [first | {"rows": rows}, *others]
        return write(json.dumps(PROFILE | {"parameters": parameters}), "p.json")

    for known in (20, None):
        told = [p.rows for p in read_profile(with_rows(known)).parameters]
        assert told == [known, *(None for _ in others)]
    for wrong in (0, 2.5, "x"):
        with pytest.raises(ImportFailedError, match=f"rows of {first['name']!r} is"):
            read_profile(with_rows(wrong))
    with pytest.raises(ImportFailedError, match=r"has 100 elements, which are no 30 rows"):
        read_profile(with_rows(30))


@pytest.mark.parametrize("sigma", [-0.1, 1.5, "small", True, [0.1]])
def test_what_is_no_sigma(write: Write, sigma: Any) -> None:
    with pytest.raises(ImportFailedError, match=r"sigma is .*; wanted a"):
        read_profile(write(json.dumps(PROFILE | {"sigma": sigma}), "p.json"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0.1, 0.2], "iterations_s must be a list of iterations, each a list of one number"),
        ([[0.1], [0.1, 0.2]], "iterations_s must be a list of iterations, each a list of one"),
        ([[]], "iterations_s must be a list of iterations, each a list of one number per rank"),
        ([[0.0]], "iterations_s"),
        ([["x"]], "iterations_s"),
    ],
)
def test_iterations_that_are_none(write: Write, rows: Any, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read_profile(write(json.dumps(PROFILE | {"iterations_s": rows}), "p.json"))


@pytest.mark.parametrize("key", sorted(set(PROFILE) - {"buffers"}))
def test_a_profile_needs_each_key(write: Write, key: str) -> None:
    lacking = {name: value for name, value in PROFILE.items() if name != key}
    with pytest.raises(ImportFailedError, match=key):
        read_profile(write(json.dumps(lacking), "profile.json"))


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
    parameters = [p | {"dtype": dtype} for p in PROFILE["parameters"]]
    with pytest.raises(ImportFailedError, match=f"p.json: {said}"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))


def test_a_profile_names_each_parameter_once(write: Write) -> None:
    parameters = [*PROFILE["parameters"], PROFILE["parameters"][0]]
    with pytest.raises(ImportFailedError, match=r"p\.json: lists 'a\.weight' twice; a parameter"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))
    with pytest.raises(ImportFailedError, match=r"p\.csv: lists 'a' twice; a parameter"):
        read_profile(write("param_name,numel,ready_us\na,4,1\na,4,2\n", "p.csv"))


def test_the_bytes_of_every_buffer_that_is_read_are_known(write: Write) -> None:
    kinds = ("complex64", "complex128", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint64")
    buffers = [{"numel": 4, "dtype": f"torch.{kind}"} for kind in kinds]
    read = read_profile(write(json.dumps(PROFILE | {"buffers": buffers}), "p.json")).buffers
    assert [Buffer(*each).size_bytes for each in read] == [32, 64, 4, 4, 8, 32]
    assert ITEM_BYTES.keys() == set(model._BUFFER_DTYPES)


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
