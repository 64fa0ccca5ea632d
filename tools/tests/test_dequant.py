"""The bench `dequant` without a GPU: its formats are what they say, PyTorch's operators give the decoders' numbers, and its page."""

import json
import time
import types

import dequant
import dequant_formats
import dequant_peers
import place
import pytest
import torch
from weightstream import _native

SHAPE = (256, 512)


@pytest.fixture(scope="module")
def formats():
    return dequant_formats.described(*SHAPE)


def test_every_format_is_described_with_parts_of_its_size(formats):
    assert len({name for name, *_ in formats}) == len(formats) > 48
    for name, weight, sizes in formats:
        assert weight.rows * weight.columns == SHAPE[0] * SHAPE[1], name
        assert _native.DeviceKernels.supports(weight), name
        decoded(weight, {tensor: torch.zeros(size, dtype=torch.uint8) for tensor, size in sizes.items()})


def decoded(weight, parts):
    """The numbers as bf16, by the CPU."""
    out = torch.empty(SHAPE, dtype=torch.bfloat16)
    given = {tensor: (part.data_ptr(), part.nbytes) for tensor, part in parts.items()}
    weight.dequantize(given, [(0, weight.rows)], out.data_ptr(), out.nbytes, "BF16")
    return out


def test_others_give_nearly_the_same_numbers(formats, monkeypatch):
    monkeypatch.setattr(place, "TENSORS", "cpu")
    compared = 0
    for name, weight, sizes in formats:
        parts = dequant_formats.filled(name, weight, sizes, dequant.numbers)
        want = decoded(weight, parts).double()
        for other, make in dequant_peers.of(name, weight).items():
            if other == "bitsandbytes":
                continue
            have = make(parts)().double().view(SHAPE)
            error = (have - want).norm() / want.norm()
            assert error < 0.02, (name, other, error)
            compared += 1
    assert compared >= 8


def test_columns_name_groups_that_there_are(formats, monkeypatch):
    monkeypatch.setattr(place, "TENSORS", "cpu")
    seen = []
    for name, weight, sizes in formats:
        parts = dequant_formats.filled(name, weight, sizes, dequant.numbers)
        for role, tensor, *_ in weight.parts:
            if role == "GroupIndex":
                index = parts[tensor].view(torch.int32)
                assert torch.isfinite(decoded(weight, parts).float()).all(), name
                seen.append(bool((index.diff() >= 0).all()))
    assert seen.count(False) == 1 and seen.count(True) >= 5


def test_bytes_are_numbers_whatever_float_they_are(monkeypatch):
    monkeypatch.setattr(place, "TENSORS", "cpu")
    bytes_ = dequant.numbers(1 << 16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.isfinite(bytes_.view(dtype).float()).all(), dtype


class Kernels:
    """The CPU in the place of a device's kernels."""

    def __init__(self, ordinal):
        assert ordinal == 0

    def dequantize(self, weight, parts, rows, out, dtype, stream):
        size = (rows[1] - rows[0]) * weight.columns * (4 if dtype == "F32" else 2)
        weight.dequantize(parts, [rows], out, size, dtype)


class Event:
    """A mark with the time of the CPU."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_it_measures_every_format_and_others_beside_it(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "TENSORS", "cpu")
    monkeypatch.setattr(_native, "DeviceKernels", Kernels)
    for name, value in (
        ("is_available", lambda: True),
        ("get_device_name", lambda index: "a GPU"),
        ("current_device", lambda: 0),
        ("current_stream", lambda: types.SimpleNamespace(cuda_stream=0)),
        ("synchronize", lambda: None),
        ("Event", Event),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    out = tmp_path / "dequant.json"
    arguments = ["dequant.py", "--out", str(out), "--rows", "128", "--columns", "256", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    assert dequant.main() == 0
    result = json.loads(out.read_text())
    assert len(result["formats"]) == 3 * len(dequant_formats.described(128, 256))
    assert all(row["bytes_per_second"] > 0 for row in result["formats"])
    told = [other for row in result["formats"] for other in row.get("others", {})]
    assert {"PyTorch", "diffusers"} <= set(told)
    page = tmp_path / "dequant.md"
    monkeypatch.setattr("sys.argv", ["dequant.py", "--page", str(out), "--out", str(page)])
    assert dequant.main() == 0
    assert page.read_text().count("| IQ2_S |") == 1


def test_the_page_says_what_is_missed():
    def row(name, dtype, rate):
        return {"format": name, "dtype": dtype, "bytes": 100, "seconds": 100 / rate, "bytes_per_second": rate}

    rows = [row(name, dtype, rate) for name, rate in (("Q4_0", 50e9), ("IQ2_S", 40e9)) for dtype in dequant.DTYPES]
    for one in rows[::3]:
        one["others"] = {"PyTorch": 4 * one["seconds"], "bitsandbytes": "ImportError: none"}
    result = {"device": "a GPU", "torch": "2", "commit": "c", "rows": 2, "columns": 3, "formats": rows}
    result["copy_bytes_per_second"] = 100e9
    result["must_hold"] = dequant.must_hold(result)
    text = dequant.page(result, "dequant.json")
    assert "| Q4_0 | 50 (0.50) | 50 (0.50) | 50 (0.50) | PyTorch 4.0 |" in text
    assert "2 of 4 are missed" in text and "- Q4_0 as bf16, of a copy's rate: 0.50, at least 0.6: missed" in text
    assert "IQ2_S as" not in text and "Not measured: bitsandbytes: ImportError: none" in text
