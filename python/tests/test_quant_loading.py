"""Quantized files in models: every format in the layers that compute with it, beside plain weights, renamed and tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import write
from quant_files import CORPUS, corpus, int8_numbers, int8_parts, steps_apart
from quant_models import ALL, FILES, bits, empty, quantized, reference
from torch import Tensor, nn

from weightstream import QuantizationError, WeightsError, offload
from weightstream._native import Checkpoint
from weightstream.quant import QuantConv2d, QuantEmbedding, QuantLinear, QuantModule


def test_layers_whose_weights_are_packed_are_replaced_and_others_get_numbers(tmp_path: Path) -> None:
    file, plain = quantized(ALL)
    path = write(tmp_path / "x.safetensors", file)
    model = empty()
    offload.load_model_data(model, path, default_dtype=torch.float32)
    assert isinstance(model.embed, QuantEmbedding) and isinstance(model.conv, QuantConv2d)
    assert [isinstance(block, QuantLinear) for block in model.blocks] == [True, False, True]
    assert type(model.table) is nn.Parameter and torch.equal(model.table, plain["table"])
    index = torch.tensor([[1, 5, 39]])
    with torch.inference_mode():
        assert torch.equal(model(index), reference(plain)(index))
    # The packed bytes are the file's own.
    assert offload.load_sd(path)[0].quantized().keys() == set(ALL)
    assert model.blocks[0].state_dict()["weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("name", FILES)
def test_every_format_loads_into_layers(name: str, tmp_path: Path) -> None:
    found, expected, ulps = corpus(name)
    modules, wanted = {}, {}
    for weight, packed in found.packed.items():
        module, _, leaf = weight.rpartition(".")
        if len(packed.shape) == 2 and leaf == "weight" and 0 not in packed.shape:
            modules[module.replace(".", "/")], wanted[module] = (
                nn.Linear(packed.shape[1], packed.shape[0], device="meta"),
                packed,
            )
    model = nn.ModuleDict(modules)
    sd = {}
    for module, packed in wanted.items():
        where = module.replace(".", "/")
        sd.update({f"{where}.{local}": tensor for local, tensor in {**packed.parts, **packed.hints}.items()})
        sd[f"{where}.bias"] = torch.zeros(packed.shape[0])
    metadata: dict[str, str] = {}
    for module, packed in wanted.items():
        metadata.update({f"{module.replace('.', '/')}.{key}": text for key, text in packed.metadata.items()})
    source = Checkpoint.open([str(CORPUS / f"{name}.safetensors")]).metadata()[0]
    for key in ("_quantization_metadata", "quantization_config", "quantization_map_base64", "quantization_map"):
        if key in source:
            metadata[key] = source[key]
    if not wanted:
        return
    path = write(tmp_path / "x.safetensors", sd, metadata)
    offload.load_model_data(model, path, default_dtype=torch.float32)
    for module, packed in wanted.items():
        layer = model[module.replace(".", "/")]
        assert isinstance(layer, QuantLinear), module
        if not packed.weight.transforms and packed.name in expected:
            want = expected[packed.name].reshape(packed.shape)
            assert steps_apart(layer.weight + 0, want) <= ulps, module
    # What is saved is what was loaded, also where only metadata told.
    offload.save_model(model, tmp_path / "y.safetensors")
    again = nn.ModuleDict(
        {key: nn.Linear(layer.in_features, layer.out_features, device="meta") for key, layer in model.items()}
    )
    offload.load_model_data(again, tmp_path / "y.safetensors", default_dtype=torch.float32)
    for key, layer in model.items():
        assert again[key].quant_text == layer.quant_text, key
        have, want = again[key].state_dict(), layer.state_dict()
        for tensor in want:
            assert torch.equal(bits(have[tensor]), bits(want[tensor])), (key, tensor)


def test_prefixes_rules_and_functions_keep_what_is_packed(tmp_path: Path) -> None:
    file, plain = quantized(ALL)
    index = torch.tensor([[1, 5, 39]])
    expected = reference(plain)(index)
    inside = write(tmp_path / "x.safetensors", {f"model.diffusion_model.{name}": part for name, part in file.items()})
    renamed = write(
        tmp_path / "y.safetensors", {name.replace("blocks.", "layers."): part for name, part in file.items()}
    )
    loads: list[tuple[Any, dict[str, Any]]] = [
        (inside, {}),
        (inside, {"modelPrefix": "model.diffusion_model"}),
        (renamed, {"preprocess_sd": {"layers": "blocks"}}),
        (
            renamed,
            {"preprocess_sd": lambda sd: {name.replace("layers.", "blocks."): part for name, part in sd.items()}},
        ),
        (
            renamed,
            {"postprocess_sd": lambda sd: {name.replace("layers.", "blocks."): part for name, part in sd.items()}},
        ),
        # Tensors that a function made anew are recognised by structure again.
        (file, {"preprocess_sd": lambda sd: {name: part.clone() for name, part in sd.items()}}),
        (offload.load_sd(inside, filters="model.diffusion_model"), {}),
        (
            [
                {k: v for k, v in file.items() if "blocks.0" in k},
                {k: v for k, v in file.items() if "blocks.0" not in k},
            ],
            {},
        ),
    ]
    for source, arguments in loads:
        model = empty()
        offload.load_model_data(model, source, default_dtype=torch.float32, **arguments)
        assert isinstance(model.blocks[0], QuantLinear), arguments
        with torch.inference_mode():
            assert torch.equal(model(index), expected), arguments


@pytest.mark.parametrize("in_file", ["embed.weight", "head.weight"])
def test_tied_layers_share_their_packed_bytes(tmp_path: Path, in_file: str) -> None:
    file, _ = quantized(("embed.weight",), tied=True)
    file = {name.replace("embed.weight", in_file): tensor for name, tensor in file.items()}
    model = empty(tied=True)
    offload.load_model_data(model, write(tmp_path / "x.safetensors", file), default_dtype=torch.float32)
    assert isinstance(model.embed, QuantEmbedding) and isinstance(model.head, QuantLinear)
    assert model.embed.quant_data is model.head.quant_data
    offload.save_model(model, tmp_path / "y.safetensors")
    saved, _, ties = offload.load_sd(tmp_path / "y.safetensors")
    assert ties == {"embed.weight": ["head.weight"], "embed.weight_scale": ["head.weight_scale"]}
    again = empty(tied=True)
    offload.load_model_data(again, tmp_path / "y.safetensors", default_dtype=torch.float32)
    index = torch.tensor([[1, 5]])
    with torch.inference_mode():
        assert torch.equal(again(index), model(index))


class Scaled(nn.Embedding):
    """As models of gemma have it: a forward of its own around that of its base."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index) * 3


class Own(nn.Linear):
    """Multiplies by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def test_subclasses_of_layers_keep_their_own_forward() -> None:
    model = nn.ModuleDict({"embed": Scaled(20, 16), "own": Own(256, 6)})
    packed = corpus("rotation")[0].packed
    rotated = next(one for one in packed.values() if one.shape[1] == 512)
    model["own"] = Own(512, 6)
    sd = {**int8_parts(20, 16, "embed.weight"), "own.bias": torch.ones(6)}
    sd.update({f"own.{local}": tensor for local, tensor in {**rotated.parts, **rotated.hints}.items()})
    offload.load_model_data(model, sd, default_dtype=torch.float32)
    assert isinstance(model["embed"], Scaled) and isinstance(model["embed"], QuantEmbedding)
    index = torch.tensor([3, 7])
    assert torch.equal(model["embed"](index), int8_numbers(sd, "embed.weight")[index] * 3)
    layer = QuantLinear.from_parts(rotated.weight, rotated.parts, torch.ones(6), dtype=torch.float32)
    x = torch.randn(2, 512)
    torch.testing.assert_close(model["own"](x), layer(x), rtol=1e-4, atol=1e-4)


def test_types_follow_the_rules(tmp_path: Path) -> None:
    file, _ = quantized(ALL)
    path = write(tmp_path / "x.safetensors", file)
    for default, compute in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (None, torch.float32)):
        model = empty()
        offload.load_model_data(model, path, default_dtype=default)
        assert model.blocks[0].compute_dtype == model.table.dtype == compute
        assert torch.equal(model.blocks[0].state_dict()["weight_scale"], file["blocks.0.weight_scale"])
    model = empty()
    model.blocks[0]._lock_dtype = torch.float32
    offload.load_model_data(model, path)
    assert model.blocks[0].weight.dtype == torch.float32 and model.blocks[2].weight.dtype == torch.bfloat16


def wrong(change: str) -> dict[str, Tensor]:
    file, _ = quantized(("blocks.0.weight", "blocks.2.weight"))
    if change == "no scale":
        del file["blocks.2.weight_scale"]  # FP8, and its neighbours are scaled
        file["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    elif change == "another shape":
        file.update(int8_parts(16, 32, "blocks.0.weight"))
    elif change == "unknown":
        file["blocks.0.qzeros"] = torch.zeros(4, dtype=torch.int32)
    elif change == "marker":
        file["blocks.0.comfy_quant"] = torch.tensor(list(b'{"format": "int8_tens'), dtype=torch.uint8)
    elif change == "packed":
        del file["blocks.0.weight"], file["blocks.0.weight_scale"]
        file["blocks.0.weight_packed"] = torch.zeros(32, 4, dtype=torch.int32)
    return file


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("no scale", r"blocks\.2\.weight.* has no scale"),
        ("another shape", r"blocks\.0\.weight.*\[16, 32\].*\[32, 32\]"),
        ("unknown", r"blocks\.0\.weight.*blocks\.0\.qzeros"),
        ("marker", r"blocks\.0\.comfy_quant"),
        ("packed", r"blocks\.0\.weight.*weight_packed"),
    ],
)
def test_what_is_not_understood_names_the_layer_and_changes_nothing(tmp_path: Path, change: str, text: str) -> None:
    model = empty()
    before = {name: id(module) for name, module in model.named_modules()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(QuantizationError, match=text):
        offload.load_model_data(model, write(tmp_path / "x.safetensors", wrong(change)))
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert parameters == {name: id(parameter) for name, parameter in model.named_parameters()}


def test_a_failed_load_puts_layers_back(tmp_path: Path) -> None:
    file, _ = quantized(ALL)
    del file["norm.weight"]
    model = empty()
    before = dict(model.blocks._modules)
    with pytest.raises(WeightsError, match="lacks 1 weights.*norm.weight"):
        offload.load_model_data(model, file)
    assert dict(model.blocks._modules) == before and model.blocks[0].weight.is_meta
    file["other.weight"], file["other.weight_scale"] = (
        file["blocks.0.weight"].clone(),
        file["blocks.0.weight_scale"].clone(),
    )
    file["norm.weight"] = torch.ones(32)
    with pytest.raises(WeightsError, match=r"does not use: other\.weight"):
        offload.load_model_data(model, file)
    offload.load_model_data(model, file, ignore_unused_weights=True)
    assert isinstance(model.blocks[0], QuantLinear)


def test_packed_weights_load_into_packed_layers_again() -> None:
    file, plain = quantized(ALL)
    other, other_plain = quantized(ALL, seed=7)
    model = empty()
    offload.load_model_data(model, file, default_dtype=torch.float32)
    offload.load_model_data(model, other, default_dtype=torch.float32)
    index = torch.tensor([[2, 3]])
    with torch.inference_mode():
        assert torch.equal(model(index), reference(other_plain)(index))


def test_all_of_a_packed_model_is_its_packed_bytes() -> None:
    file, _ = quantized(ALL)
    model = empty()
    offload.load_model_data(model, file)
    for layer in model.modules():
        if isinstance(layer, QuantModule):
            for name, part in layer.quant_parts().items():
                assert part.nbytes == sum(p.nbytes for p in layer.parameters() if p.data_ptr() == part.data_ptr()), name


def test_shared_modules_stay_packed_in_the_second_model() -> None:
    file, plain = quantized(("blocks.0.weight", "blocks.2.weight"))
    main = {name: part for name, part in file.items() if not name.startswith("blocks.2.")}
    module = {name: part for name, part in file.items() if name.startswith("blocks.2.")}
    shared: dict[str, Any] = {}
    first, second = empty(), empty()
    offload.load_model_data(first, main, modules=module, return_shared_modules=shared, default_dtype=torch.float32)
    offload.load_model_data(second, main, modules=shared, default_dtype=torch.float32)
    assert isinstance(second.blocks[2], QuantLinear)
    assert second.blocks[2].quant_data.data_ptr() == first.blocks[2].quant_data.data_ptr()
    assert second.blocks[2].bias is first.blocks[2].bias
    index = torch.tensor([[4, 1]])
    with torch.inference_mode():
        assert torch.equal(second(index), reference(plain)(index))
