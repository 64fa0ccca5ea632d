"""The convolution route on a GPU: the bits of resident execution, sources back after an interruption, PyTorch's own allocator."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from convolution_models import image, net, state
from torch import nn

from weightstream import dynamic_offload as ddo

GATE = "DDO_RUN_LINEAR_CONV_CUDA_GATE"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get(GATE) != "1", reason=f"runs with {GATE}=1"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]


def enable(model: nn.Module, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"environ": {}, "route": "linear_convolution", "component": "vae", "small_tensor_threshold_bytes": 0}
    return ddo.enable_offload(model, **{**options, **arguments})


def resident(dtype: torch.dtype, layout: torch.memory_format | None = None) -> torch.Tensor:
    model = net(dtype).cuda()
    if layout is not None:
        model.flat.to(memory_format=layout)
    with torch.inference_mode():
        return model(image(dtype).cuda())


@pytest.fixture(autouse=True)
def fixed_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels chosen by timing are outside every claim."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_as_resident(dtype: torch.dtype, pin: bool) -> None:
    expected, model = resident(dtype), net(dtype)
    plain = state(model)
    for _ in range(2):
        result = enable(model, pin_cpu_memory=pin)
        setup = state_on_host(model)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(model(image(dtype).cuda()), expected)
        assert state_on_host(model) == setup, "sources keep their addresses and bytes"
        assert result.metrics_snapshot().as_dict()["runtime"]["copy_runtime"]["convolution_parameter"]["calls"] == 12
        assert (result.event_payload["setup_runtime"]["linear_weight_pin"]["calls"] > 0) == pin
        ddo.remove_dynamic_offload(model)
        after = state(model)
        assert {name: (*entry[2:], entry[0]) for name, entry in after.items()} == {
            name: (*entry[2:], entry[0]) for name, entry in plain.items()
        }


def state_on_host(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Address and bytes of the weights that stay in CPU memory."""
    return {
        name: (p.data_ptr(), p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, p in model.named_parameters()
        if p.device.type == "cpu"
    }


def test_channels_last_keeps_its_strides() -> None:
    expected = resident(torch.float32, torch.channels_last)
    model = net()
    model.flat.to(memory_format=torch.channels_last)
    enable(model)
    with torch.inference_mode():
        assert torch.equal(model(image().cuda()), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_sources_are_back_after_an_interruption(error: type[BaseException]) -> None:
    expected, model = resident(torch.float32), net()
    enable(model)
    before = state_on_host(model)
    original = model.volume._conv_forward

    def fails(*args: Any) -> torch.Tensor:
        original(*args)
        raise error

    model.volume._conv_forward = fails  # type: ignore[method-assign]
    with torch.inference_mode():
        with pytest.raises(error):
            model(image().cuda())
        assert state_on_host(model) == before
        model.volume._conv_forward = original  # type: ignore[method-assign]
        assert torch.equal(model(image().cuda()), expected)


def test_a_capture_and_an_input_elsewhere_are_refused() -> None:
    model = net()
    enable(model)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="is on cpu"):
            model(image())
        x = image().cuda()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(graph):
            model.flat(x)


def test_weights_take_memory_for_the_time_of_a_call_only() -> None:
    torch.manual_seed(0)
    others = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Conv2d(512, 512, 3, padding=1, bias=False) for _ in range(8))).eval()
    x = torch.randn(1, 512, 4, 4, device="cuda")
    enable(model)
    with torch.inference_mode():
        model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model(x)
        assert torch.cuda.memory_allocated() == before
    assert before - others < 8 * 512 * 512 * 9 * 4
