"""load_model_data: weights into a model without data, with every rule for names, and nothing half applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import Small, empty, encoded, same, small, weights, write
from torch import nn

import weightstream
from weightstream import CheckpointError, NotAvailableError, QuantizationError, StateError, WeightsError, offload


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of the small model's weights."""
    return write(tmp_path / "x.safetensors", weights(small()))


def fits(model: nn.Module, expected: nn.Module) -> bool:
    """Whether all weights and buffers are equal, bit for bit."""
    state = model.state_dict()
    return all(same(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_all_weights_arrive_and_ties_are_kept(saved: Path) -> None:
    model = empty()
    assert model.embed.weight.is_meta and not model.frequencies.is_meta
    assert offload.load_model_data(model, saved, default_dtype=None) is None
    assert fits(model, small())
    assert model.head.weight is model.embed.weight
    index = torch.tensor([1, 2, 3])
    assert same(model(index).detach(), small()(index).detach())


def test_names_that_are_tied_in_the_file_share_storage(tmp_path: Path) -> None:
    class Apart(Small):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.empty(10, 4))

    metadata = {"tied_weights_map_base64": encoded({"embed.weight": ["head.weight"]})}
    path = write(tmp_path / "x.safetensors", weights(small()), metadata)
    for dtype in (None, torch.float64):
        with weightstream.offload.building.empty_weights():
            model = Apart()
        offload.load_model_data(model, path, default_dtype=dtype)
        assert model.head.weight is not model.embed.weight
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_dictionaries_and_tuples(saved: Path) -> None:
    for given in (weights(small()), (weights(small()), None), (weights(small()), None, None), offload.load_sd(saved)):
        model = empty()
        offload.load_model_data(model, given, default_dtype=None)
        assert fits(model, small())
    parts = [
        write(
            saved.parent / f"{inside}.safetensors",
            {n: t for n, t in weights(small()).items() if ("norm" in n) is inside},
        )
        for inside in (True, False)
    ]
    model = empty()
    offload.load_model_data(model, tuple(parts), default_dtype=None)
    assert fits(model, small())
    with pytest.raises(WeightsError, match="not from a int"):
        offload.load_model_data(empty(), 3)


def test_a_model_with_data_gets_the_files(saved: Path) -> None:
    model = small(seed=1)
    offload.load_model_data(model, saved, default_dtype=None)
    assert fits(model, small())


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    sd = dict(weights(small()))
    change(sd)
    return sd


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda sd: sd.pop("blocks.1.bias"), r"lacks 1 weights of Small: blocks\.1\.bias"),
        (lambda sd: sd.pop("norm.running_var"), r"lacks 1 weights of Small: norm\.running_var"),
        (lambda sd: sd.update({"zz.w": torch.zeros(1)}), r"has 1 weights that Small does not use: zz\.w"),
        (lambda sd: sd.update({"blocks.0.weight": torch.zeros(5, 4)}), r"blocks\.0\.weight.*\[5, 4\]"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_change_nothing(change: Any, text: str) -> None:
    for model in (empty(), small(seed=1)):
        before = {name: id(tensor) for name, tensor in model.named_parameters()}
        buffers = {name: id(tensor) for name, tensor in model.named_buffers()}
        with pytest.raises(WeightsError, match=text):
            offload.load_model_data(model, changed(change))
        assert {name: id(tensor) for name, tensor in model.named_parameters()} == before
        assert {name: id(tensor) for name, tensor in model.named_buffers()} == buffers
        assert model.head.weight is model.embed.weight


def test_what_may_be_tolerated(saved: Path) -> None:
    model = empty()
    extra = changed(lambda sd: sd.update({"zz.w": torch.zeros(1)}))
    offload.load_model_data(model, extra, default_dtype=None, ignore_unused_weights=True)
    assert fits(model, small())
    model = small(seed=1)
    kept = model.blocks[1].bias.detach().clone()
    lacking = changed(lambda sd: sd.pop("blocks.1.bias"))
    offload.load_model_data(model, lacking, default_dtype=None, ignore_missing_keys=True)
    assert same(model.blocks[1].bias.detach(), kept) and same(model.blocks[1].weight, small().blocks[1].weight)
    with pytest.raises(WeightsError, match=r"1 parameters of Small have no data: blocks\.1\.bias"):
        offload.load_model_data(empty(), lacking, ignore_missing_keys=True)


def test_buffers_without_data_are_refused(saved: Path) -> None:
    with torch.device("meta"):
        model = Small()
    with pytest.raises(WeightsError, match="frequencies.*build it with real buffers"):
        offload.load_model_data(model, saved)


def test_prefixes_are_stripped(tmp_path: Path) -> None:
    prefixed = {"model." + name: tensor for name, tensor in weights(small()).items()}
    for given, prefix in (
        (prefixed, None),
        ({**prefixed, "other.x": torch.zeros(1)}, "model"),
        ({**prefixed, "other.x": torch.zeros(1)}, "model."),
        ({"a.b." + name: tensor for name, tensor in prefixed.items()}, None),
    ):
        model = empty()
        offload.load_model_data(model, write(tmp_path / "x.safetensors", given), default_dtype=None, modelPrefix=prefix)
        assert fits(model, small())
    with pytest.raises(WeightsError, match="no weights below 'nope'"):
        offload.load_model_data(empty(), prefixed, modelPrefix="nope")


def test_rules_that_rename() -> None:
    def check(given: dict[str, Any], rules: Any) -> None:
        model = empty()
        offload.load_model_data(model, given, default_dtype=None, preprocess_sd=rules)
        assert fits(model, small())

    plain = weights(small())
    old = {name.replace("blocks", "old.layers"): tensor for name, tensor in plain.items()}
    check(old, {"old.layers": "blocks"})
    check(old, {"old.layers.": "blocks."})
    check({("old." + name if name.startswith("norm") else name): tensor for name, tensor in plain.items()}, {"old": ""})
    check({**plain, "x.y": torch.zeros(1), "x": torch.zeros(1)}, {"x": None})
    check(
        {name.removeprefix("blocks."): t for name, t in plain.items() if name.startswith("blocks.")}
        | {name: t for name, t in plain.items() if not name.startswith("blocks.")},
        {str(number): f"blocks.{number}" for number in range(3)},
    )
    with pytest.raises(WeightsError, match=r"norm\.weight would be named"):
        check(dict(plain), {"norm": "blocks.0", "blocks.0": "blocks.0"})


def test_functions_get_as_much_as_they_take(tmp_path: Path) -> None:
    metadata = {"tied_weights_map_base64": encoded({"embed.weight": ["head.weight"]})}
    path = write(tmp_path / "x.safetensors", weights(small()), metadata)
    seen: list[Any] = []

    def one(sd: dict[str, Any], verbose: int = 2) -> dict[str, Any]:
        seen.append(verbose)
        return {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in sd.items()}

    def two(sd: dict[str, Any], quantization_map: Any) -> tuple[Any, Any]:
        seen.append(quantization_map)
        return sd, quantization_map

    def three(sd: dict[str, Any], quantization_map: Any, tied_map: Any) -> tuple[Any, Any, Any]:
        seen.append(tied_map)
        return sd, quantization_map, tied_map

    for function in (one, two, three):
        model = empty()
        offload.load_model_data(model, path, default_dtype=None, preprocess_sd=function)
        factor = 2 if function is one else 1
        assert same(model.norm.weight.detach(), small().norm.weight.detach() * factor)
    assert seen == [2, None, {"embed.weight": ["head.weight"]}]
    model = empty()
    offload.load_model_data(model, path, default_dtype=None, postprocess_sd=one)
    assert same(model.norm.weight.detach(), small().norm.weight.detach() * 2)
    with pytest.raises(WeightsError, match="preprocess_sd returned a int"):
        offload.load_model_data(empty(), path, preprocess_sd=lambda sd: 3)
    for given, said in (
        (lambda sd: None, "postprocess_sd returned a NoneType"),
        (lambda sd: {**sd, "norm.weight": 3}, "postprocess_sd returned a int for norm.weight"),
        ("no function", "postprocess_sd is a str: give a function"),
    ):
        with pytest.raises(WeightsError, match=said):
            offload.load_model_data(empty(), path, postprocess_sd=given)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.q, self.inner.k, self.inner.v = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.out = nn.Linear(4, 4)


def test_fused_weights_are_split_as_views(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fused = {"inner.qkv.weight": torch.rand(8, 4), "inner.qkv.bias": torch.rand(8)}
    out = {"out.weight": torch.rand(4, 4), "out.bias": torch.rand(4)}
    path = write(tmp_path / "x.safetensors", {**fused, **out})
    sized = {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [4, 2, 2]}}
    for split in (sized, {"qkv": {"mapped_modules": ["q", "k", "v"]}}, {"inner.qkv": ["q", "k", "v"]}):
        with weightstream.offload.building.empty_weights():
            model = Attention()
        if "inner.qkv" in split:
            split = {"qkv": split["inner.qkv"]}
        offload.load_model_data(model, path, default_dtype=None, fused_split_map=split)
        inner = model.inner
        for kind in ("weight", "bias"):
            joined = torch.cat([getattr(part, kind).detach() for part in (inner.q, inner.k, inner.v)])
            assert same(joined, fused[f"inner.qkv.{kind}"])
    for bad, text in (
        ({"mapped_modules": ["q", "k", "v"], "split_sizes": [4, 2, 1]}, r"inner\.qkv\.weight has 8 rows.* = 7"),
        ({"mapped_modules": ["q", "k", "v"], "split_sizes": [4, 4]}, "for 3 modules"),
        ({}, "mapped_modules"),
    ):
        with weightstream.offload.building.empty_weights():
            model = Attention()
        with pytest.raises(WeightsError, match=text):
            offload.load_model_data(model, path, fused_split_map={"qkv": bad})


def test_modules_are_added_and_shared_with_a_second_model(tmp_path: Path) -> None:
    plain = weights(small())
    last = {name: tensor for name, tensor in plain.items() if name.startswith("blocks.2")}
    base = write(tmp_path / "base.safetensors", {name: tensor for name, tensor in plain.items() if name not in last})
    module = write(tmp_path / "module.safetensors", last)
    shared: dict[str, Any] = {}
    first, second = empty(), empty()
    offload.load_model_data(first, base, modules=[str(module)], return_shared_modules=shared)
    assert set(shared) == {"state_dict", "quantization_map", "parameters"}
    assert set(shared["parameters"]) == set(last)
    offload.load_model_data(second, base, modules=shared)
    assert second.blocks[2].weight is first.blocks[2].weight
    assert second.blocks[1].weight is not first.blocks[1].weight
    assert fits(second, first)
    with pytest.raises(CheckpointError, match=r"blocks\.2\.weight is in both"):
        offload.load_model_data(empty(), [base, module], modules=module)


def test_what_says_that_it_is_quantized_and_is_not_understood_is_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(NotAvailableError, match="'qint7'"):
        offload.load_model_data(empty(), saved, do_quantize=True, quantizationType="qint7")
    metadata = {"quantization_map_base64": encoded({"blocks.0": {"weights": "qint8", "activations": "none"}})}
    path = write(tmp_path / "q.safetensors", weights(small()), metadata)
    with pytest.raises(QuantizationError, match=r"blocks\.0\.weight.* is qint8, and its tensors are F32"):
        offload.load_model_data(empty(), path)
    scaled = {**weights(small()), "blocks.0.scale_weight": torch.ones(1)}
    with pytest.raises(QuantizationError, match=r"blocks\.0\.scale_weight"):
        offload.load_model_data(empty(), scaled)
    model = empty()
    offload.load_model_data(model, saved, quantize_exclude=["head"], quantizationType=offload.qint8)


def test_what_the_model_itself_calls_so_is_no_quantization() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(2, dtype=torch.int32))
            self.register_buffer("packed", torch.zeros(2, dtype=torch.float8_e4m3fn))
            self.weight_scale = nn.Parameter(torch.zeros(1))

    given = {
        "qweight": torch.ones(2, dtype=torch.int32),
        "packed": torch.ones(2).to(torch.float8_e4m3fn),
        "weight_scale": torch.ones(1),
    }
    model = Own()
    offload.load_model_data(model, given, default_dtype=None)
    assert all(same(tensor, given[name]) for name, tensor in model.state_dict().items())


def test_models_that_rename_old_weights_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = {"weight_g": torch.rand(4, 1), "weight_v": torch.rand(4, 4), "bias": torch.rand(4)}
    with weightstream.offload.building.empty_weights():
        model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    offload.load_model_data(model, old)
    assert model.parametrizations.weight.original0.dtype == torch.bfloat16 == model.bias.dtype
    assert same(model.parametrizations.weight.original1.detach(), old["weight_v"].bfloat16())


def test_an_attached_model_is_left_alone(saved: Path) -> None:
    model = small()
    attachment = weightstream.attach(model, device="host", budget="64MiB")
    with attachment, pytest.raises(StateError, match="detach it"):
        offload.load_model_data(model, saved)


def test_what_pinning_was_asked_for_is_kept_with_the_model(saved: Path) -> None:
    for options, expected in (
        ({}, None),
        ({"pinToMemory": True}, "all"),
        ({"pinToMemory": True, "partialPinning": True}, "towers"),
    ):
        model = empty()
        offload.load_model_data(model, saved, **options)
        assert model._weightstream_load["pin"] == expected
