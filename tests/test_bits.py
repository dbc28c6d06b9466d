"""Records of bits are the same in each run, and a changed tensor shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

import bits

CASE = "relu_hardswish 3x4x5x6 nchw torch.float32"
WORDS = "relu_hardswish 3x4"  # of this one and its other dtypes
CONV = "conv2d_relu_hardswish 3-16 ieee"


def test_records_of_one_build_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (bits.record("cpu", CONV) for _ in range(2))
    assert first["cases"][CONV].keys() == {
        "inference", "output", "grad_input", "grad_weight", "grad_conv_bias"
    }  # fmt: skip
    assert ": direct" in first["plans"][CONV][0]
    assert bits.compare(first, again) == 0
    assert capsys.readouterr().out == "1 of 1 plans equal\n1 of 1 cases equal\n"


def test_a_changed_bit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(tmp_path / name) for name in "ab")
    for path in (a, b):
        assert bits.main(["write", path + ".json", "--device", "cpu", "--only", WORDS, "--keep", path]) == 0
    assert bits.main(["compare", a + ".json", b + ".json"]) == 0
    record = json.loads((tmp_path / "b.json").read_text())
    tensors = torch.load(tmp_path / "b" / "tensors.pt")
    values = tensors[f"{CASE}: grad_input"]
    values.view(torch.int32)[0, 1, 2, 3] ^= 1
    record["cases"][CASE]["grad_input"] = bits.bits_of(values)
    (tmp_path / "b.json").write_text(json.dumps(record))
    torch.save(tensors, tmp_path / "b" / "tensors.pt")
    capsys.readouterr()
    assert bits.main(["compare", a + ".json", b + ".json", "--tensors", a, b]) == 1
    name, distance, largest, _, count = capsys.readouterr().out.splitlines()
    assert name == f"{CASE}: grad_input"
    assert 0 < float(distance.split()[-1]) < 1e-6
    assert largest.split()[-1] == distance.split()[-1]
    cases = len(record["cases"])
    assert count == f"{cases - 1} of {cases} cases equal; differ: {CASE}"


def test_a_case_of_one_record_only_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    a: bits.Record = {"header": {"torch": "2"}, "plans": {}, "cases": {"one": {"output": "00"}}}
    b = copy.deepcopy(a)
    b["header"]["torch"] = "3"
    b["cases"]["two"] = {"output": "00"}
    assert bits.compare(a, b) == bits.compare(b, a) == 1
    assert "torch: 2, 3\ntwo: output\n" in capsys.readouterr().out


def test_nan_is_nan_and_layouts_differ() -> None:
    one, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).chunk(2)
    assert bits.bits_of(one) == bits.bits_of(other)
    image = torch.ones(2, 3, 4, 5)
    assert bits.bits_of(image) != bits.bits_of(image.contiguous(memory_format=torch.channels_last))
