"""The convolution route: what it refuses before anything moves, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from convolution_models import Net, enable, image, net, state
from dynamic_models import resident, untouched
from torch import Tensor, nn

import weightstream
from weightstream import dynamic_offload as ddo
from weightstream.dynamic_offload import convolution_checks


def same(model: nn.Module, expected: Tensor, x: Tensor) -> bool:
    return all(torch.equal(resident(model, x), expected) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_bits_as_resident(dtype: torch.dtype) -> None:
    model, x = net(dtype), image(dtype)
    expected, before = resident(model, x), state(model)
    for _ in range(2):
        result = enable(model)
        assert result.event_payload["convolutions"] == 4 and result.event_payload["linear_layers"] == 1
        assert same(model, expected, x)
        copies = result.metrics_snapshot().as_dict()["runtime"]["copy_runtime"]
        assert copies["convolution_parameter"]["calls"] == 8 and copies["linear_parameter"]["calls"] == 2
        ddo.remove_dynamic_offload(model)
        # Biases and buffers are back, too, so that it can be enabled again.
        assert state(model) == before and untouched(model) and same(model, expected, x)


def test_page_locking_is_counted_under_the_linear_runtimes_label() -> None:
    result = enable(net())
    assert set(result.event_payload["setup_runtime"]) == {"linear_weight_pin"}


@pytest.mark.parametrize("layout", [torch.channels_last, torch.channels_last_3d])
def test_channels_last_keeps_its_strides(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    flat = layout is torch.channels_last
    layer = nn.Conv2d(8, 8, 3) if flat else nn.Conv3d(8, 8, 3)
    model = nn.Sequential(layer).eval().to(memory_format=layout)
    seen: list[tuple[int, ...]] = []
    original = layer._conv_forward
    layer._conv_forward = lambda x, w, b: (seen.append(w.stride()), original(x, w, b))[1]  # type: ignore[method-assign]
    x = torch.randn(1, 8, *(6,) * (2 if flat else 3)).to(memory_format=layout)
    expected, before = resident(model, x), state(model)
    enable(model)
    out = resident(model, x)
    assert torch.equal(out, expected) and out.stride() == expected.stride()
    assert set(seen) == {layer.weight.stride()} and not layer.weight.is_contiguous()
    ddo.remove_dynamic_offload(model)
    assert state(model) == before


def shared(model: Net) -> None:
    model.scaled.weight = nn.Parameter(torch.randn(8, 8, 3, 3))
    model.other = nn.Conv2d(8, 8, 3).eval()
    model.other.weight = model.scaled.weight


def viewed(model: Net) -> None:
    model.other = nn.Conv2d(8, 8, 3).eval()
    model.other.weight = nn.Parameter(model.scaled.weight.data)


def offset(model: Net) -> None:
    both = torch.randn(16, 8, 3, 3)
    model.scaled.weight = nn.Parameter(both[:8])
    model.extra = nn.Parameter(both[8:])


def parametrized(model: Net) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.flat)


class Wrapped(nn.Parameter):
    """A parameter of another class."""


REFUSED: dict[str, tuple[Callable[[Net], Any], dict[str, Any], str]] = {
    "a budget policy": (lambda _: None, {"auto_budget_policy": "balanced"}, "auto_budget_policy"),
    "residents": (lambda _: None, {"resident_module_budget_gb": 1.0}, "resident_module_budget_gb"),
    "kept layers": (lambda _: None, {"always_resident_modules_pattern": ("head",)}, "always_resident"),
    "another mode": (lambda _: None, {"execution_mode": "sdnq_runtime"}, "linear_runtime"),
    "the flag off": (
        lambda _: None,
        {"config": ddo.DynamicOffloadConfig(execution_device="host", execution_mode="linear_runtime")},
        "linear_convolution_offload=True",
    ),
    "a profile to build": (lambda _: None, {"profile_name": "w", "build_profile": True}, "build_profile"),
    "pinned caches": (lambda _: None, {"cache_pinned_weights": True}, "cache_pinned_weights"),
    "another place": (lambda _: None, {"offload_device": "cuda"}, "offload_device"),
    "training": (lambda m: m.scaled.train(), {}, "'scaled' is in training mode"),
    "parametrizations": (parametrized, {}, "modules inside it"),
    "buffers": (lambda m: m.flat.register_buffer("x", torch.zeros(1)), {}, "has buffers"),
    "hooks": (lambda m: m.flat.register_forward_hook(lambda *_: None), {}, "forward hooks"),
    "pre-hooks": (lambda m: m.flat.register_forward_pre_hook(lambda *_: None), {}, "forward hooks"),
    "diffusers": (lambda m: setattr(m.flat, "_diffusers_hook", object()), {}, "_diffusers_hook"),
    "accelerate": (lambda m: setattr(m.flat, "_hf_hook", object()), {}, "_hf_hook"),
    "a subclass": (lambda m: setattr(m.flat, "weight", Wrapped(m.flat.weight.data)), {}, "plain nn.Parameter"),
    "another device": (lambda m: m.flat.to("meta"), {}, "on meta"),
    "strides": (
        lambda m: setattr(m.flat, "weight", nn.Parameter(torch.randn(8, 3, 3, 6)[..., ::2])),
        {},
        "neither contiguous",
    ),
    "a type": (lambda m: m.flat.to(torch.float8_e4m3fn), {}, "float8"),
    "one parameter twice": (shared, {}, "same parameter as"),
    "one storage twice": (viewed, {}, "shares its storage"),
    "one storage at two offsets": (offset, {}, "shares its storage"),
    "SDNQ": (lambda m: setattr(m.head, "sdnq_dequantizer", object()), {}, "SDNQ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_moved(case: str) -> None:
    change, arguments, text = REFUSED[case]
    model = net()
    change(model)
    tensors = [(t, t.data_ptr(), t.device) for t in [*model.parameters(), *model.buffers()]]
    with pytest.raises(ValueError, match=text):
        enable(model, **arguments)
    assert all((t.data_ptr(), t.device) == (address, device) for t, address, device in tensors)
    assert untouched(model) or case in ("diffusers",)
    assert not any("_weightstream_dynamic_offload" in part.__dict__ for part in model.modules())


def test_a_root_that_is_a_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match="itself is a Conv2d"):
        enable(nn.Conv2d(1, 1, 1).eval())


def test_another_cuda_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ddo.DynamicOffloadConfig(execution_mode="linear_runtime", linear_convolution_offload=True)
    for backend in ("cudaMallocAsync", "pluggable"):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        with pytest.raises(ValueError, match=backend):
            convolution_checks.preflight(net(), config, torch.device("cuda", 0))


def test_what_is_accepted() -> None:
    model, x = net(), image()
    expected = resident(model, x)
    before = model.up.weight.data_ptr()
    result = enable(model, profile_name="w")
    # One module under two names is patched once, a transposed convolution not at all.
    assert result.event_payload["convolutions"] == 4 and "forward" not in model.up.__dict__
    assert same(model, expected, x)
    with result.profile_run() as report:
        assert report["name"] == "w"
    ddo.remove_dynamic_offload(model)
    assert model.up.weight.data_ptr() == before
    explicit = ddo.DynamicOffloadConfig(
        execution_device="host", execution_mode="linear_runtime", linear_convolution_offload=True
    )
    assert enable(model, config=explicit).settings.config.linear_convolution_offload
    assert same(model, expected, x)
    ddo.remove_dynamic_offload(model)


def test_no_preset_and_no_variable_reaches_the_route() -> None:
    environ = {"DDO_RESIDENT_MODULE_BUDGET_GB": "3", "DDO_PRESET": "warm_process", "DDO_DISABLE_PIN_ON_WSL": "1"}
    result = enable(net(), environ=environ, running_on_wsl=True)
    config = result.settings.config
    assert (config.resident_module_budget_gb, config.auto_budget_policy, config.pin_cpu_memory) == (0, "off", True)


def test_what_a_forward_writes_to_a_buffer_stays() -> None:
    model = net()
    enable(model)
    with torch.inference_mode():
        model.norm.running_mean.add_(1)
    ddo.remove_dynamic_offload(model)
    assert torch.equal(model.norm.running_mean, torch.ones(8))


@pytest.mark.parametrize("kind", ["AutoencoderKLWan", "AutoencoderKLQwenImage"])
def test_video_autoencoders_decode_with_the_same_bits(kind: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    small = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
    means = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    model = getattr(diffusers, kind)(**small, **means).eval()
    latents = torch.randn(1, 4, 2, 4, 4)
    with torch.inference_mode():
        expected = model.decode(latents).sample
    before = state(model)
    result = enable(model)
    assert result.event_payload["convolutions"] > 10
    with result.cleanup_on_error(), torch.inference_mode():
        assert torch.equal(model.decode(latents).sample, expected)
    ddo.remove_dynamic_offload(model)
    assert state(model) == before and untouched(model)


def test_attaching_and_the_route_exclude_each_other() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Linear(4, 4)).eval().requires_grad_(False)
    ddo.enable_offload(model, route="linear_convolution", execution_device="host", environ={})
    with pytest.raises(weightstream.StateError, match="remove_dynamic_offload"):
        weightstream.attach(model, device="host")
    ddo.remove_dynamic_offload(model)
    with weightstream.attach(model, device="host"):
        with pytest.raises(weightstream.StateError, match="is attached; detach"):
            ddo.enable_offload(model, route="linear_convolution", execution_device="host", environ={})


def test_weights_that_are_packed_by_others_are_refused_by_name() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Linear(32, 32)).bfloat16().eval().requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="1.weight is a "):
        ddo.enable_offload(model, route="linear_convolution", execution_device="host", environ={})
