"""Kernels of quantized layers are loaded when a model is attached: once a description, before any forward, and without failing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quant_files import Blocks, corpus, int8_linear
from torch import nn

import weightstream
from weightstream import attaching
from weightstream.errors import DeviceError, NotAvailableError
from weightstream.quant import QuantLinear, devices


class Kernels:
    """Notes what it is asked for, and then asks the kernels of a GPU, if there are any."""

    def __init__(self, inner: Any = None, refusal: Any = None) -> None:
        self.inner, self.refusal, self.calls = inner, refusal, []

    def prepare(self, weight: Any, dtype: str) -> None:
        self.calls.append(("prepare", weight.to_json(), dtype))
        if self.refusal is not None:
            raise self.refusal
        if self.inner is not None:
            self.inner.prepare(weight, dtype)

    def dequantize(self, weight: Any, *rest: Any) -> None:
        self.calls.append(("dequantize", weight.to_json(), rest[3]))
        self.inner.dequantize(weight, *rest)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(devices, "_kernels", lambda index: made)
    return made


def gpu(emulated: bool = False) -> Any:
    return SimpleNamespace(emulated=emulated, device=torch.device("cuda", 0))


def test_each_description_is_loaded_once_for_the_types_that_kernels_write(kernels: Kernels) -> None:
    small, large = int8_linear(8, 16), int8_linear(16, 8)
    model = nn.Sequential(small, large, int8_linear(8, 16, seed=1), nn.Linear(8, 8))
    large.compute_dtype = torch.bfloat16
    attaching._load_kernels(model, gpu())
    assert sorted(kernels.calls) == sorted(
        [("prepare", small.quant_text, "F32"), ("prepare", large.quant_text, "BF16")]
    )
    kernels.calls.clear()
    for other in (nn.Linear(4, 4), nn.Sequential(int8_linear(8, 16).double())):
        attaching._load_kernels(other, gpu())
    attaching._load_kernels(model, gpu(emulated=True))
    with weightstream.attach(nn.Sequential(int8_linear(8, 16)), device="host"):
        pass
    assert not kernels.calls


@pytest.mark.parametrize("refusal", [NotAvailableError("no kernel"), DeviceError("no module")])
def test_what_cannot_be_loaded_fails_no_attach(kernels: Kernels, refusal: Exception) -> None:
    kernels.refusal = refusal
    attaching._load_kernels(nn.Sequential(int8_linear(8, 16), int8_linear(4, 4)), gpu())
    assert len(kernels.calls) == 2


@pytest.mark.gpu
def test_no_forward_on_the_device_loads_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Kernels(devices._kernels(0))
    monkeypatch.setattr(devices, "_kernels", lambda index: made)
    model = Blocks(4, 256)
    with torch.inference_mode(), weightstream.attach(model, device="cuda", budget="8MiB"):
        model(torch.randn(2, 256, device="cuda"))
    kinds = [kind for kind, *_ in made.calls]
    assert "dequantize" in kinds and "prepare" not in kinds[kinds.index("dequantize") :]
    assert {call[1:] for call in made.calls if call[0] == "dequantize"} <= {
        call[1:] for call in made.calls if call[0] == "prepare"
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["awq", "compressed-tensors-int", "gptq", "gptq-3bit", "gptq-v2", "nvfp4-compressed-tensors"]
)
def test_words_of_integers_are_decoded_by_kernels_and_by_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Kernels(devices._kernels(0))
    monkeypatch.setattr(devices, "_kernels", lambda index: made)
    monkeypatch.delattr(devices, "expression")
    monkeypatch.delattr(devices, "note_once")
    found = corpus(name)[0].packed.values()
    for packed in found:
        layer = QuantLinear.from_parts(packed.weight, packed.parts, dtype=torch.bfloat16)
        x = torch.randn(3, layer.in_features, dtype=torch.bfloat16).cuda()
        want = nn.functional.linear(x, (layer.weight + 0).cuda())
        # Scales may be no numbers.
        torch.testing.assert_close(layer.cuda()(x), want, rtol=0, atol=0, equal_nan=True, msg=packed.name)
    assert len(made.calls) == len(found) > 0
