"""Quantized files in models: every format in the layers that compute with it, beside plain weights, renamed, split, tied, saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import write
from quant_files import CORPUS, corpus, fp8_parts, int8_numbers, int8_parts, steps_apart
from torch import Tensor, nn
from torch.nn import functional as F

from weightstream import NotAvailableError, QuantizationError, WeightsError, offload
from weightstream._native import Checkpoint
from weightstream.offload.building import empty_weights
from weightstream.quant import QuantConv2d, QuantEmbedding, QuantLinear, QuantModule

FILES = ("bnb", "fp8", "fp8-plain", "int8", "mxfp8", "nunchaku", "nvfp4", "quanto", "torchao", "w4a8", "rotation")


class Model(nn.Module):
    """One layer of each kind that may stay packed, and one parameter that may not."""

    def __init__(self, width: int = 32, vocabulary: int = 40, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.LayerNorm(width)
        self.table = nn.Parameter(torch.zeros(6, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for block in self.blocks:
            x = self.norm(x + block(x))
        x = x + self.conv(x.view(-1, 1, 4, 8)).mean() + self.table.sum(0)
        return self.head(x)


def empty(**kwargs: Any) -> Model:
    with empty_weights():
        return Model(**kwargs).eval()


def quantized(names: tuple[str, ...], seed: int = 0, tied: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of the model, those of `names` in INT8 or FP8; and the numbers that all of them stand for."""
    torch.manual_seed(seed)
    plain = {name: tensor.detach().clone() for name, tensor in Model(tied=tied).state_dict().items()}
    plain["table"] = torch.randn(6, 32)
    if tied:
        del plain["head.weight"]
    file = dict(plain)
    for number, name in enumerate(names):
        shape = plain.pop(name).shape
        flat = (fp8_parts if number % 2 else int8_parts)(shape[0], shape[1:].numel(), name, seed + number)
        del file[name]
        file.update({key: part.view(shape) if key == name else part for key, part in flat.items()})
        plain[name] = (file[name].float().view(shape[0], -1) * file[f"{name}_scale"].reshape(-1, 1)).view(shape)
    return file, plain


ALL = ("embed.weight", "blocks.0.weight", "blocks.2.weight", "conv.weight", "table")


def reference(plain: dict[str, Tensor], **kwargs: Any) -> Model:
    model = Model(**kwargs).eval()
    model.load_state_dict(plain, strict=not kwargs)
    return model


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
    for key in ("_quantization_metadata", "quantization_map_base64", "quantization_map"):
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


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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


class Split(nn.Module):
    def __init__(self, width: int, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, count, bias=True, device="meta") for count in rows)


@pytest.mark.parametrize("name", FILES[:-1])
def test_fused_weights_of_every_format_are_split(name: str) -> None:
    """Packed where rows lie apart, as numbers otherwise: the same numbers either way."""
    found, expected, ulps = corpus(name)
    kinds = set()
    for packed in found.packed.values():
        if len(packed.shape) != 2 or packed.shape[0] < 3 or 0 in packed.shape or packed.weight.transforms:
            continue
        third = packed.shape[0] // 3
        sizes = (third, third, packed.shape[0] - 2 * third)
        sd = {f"qkv.{local}": tensor for local, tensor in {**packed.parts, **packed.hints}.items()}
        sd["qkv.bias"] = torch.arange(float(packed.shape[0]))
        model = Split(packed.shape[1], sizes)
        split = {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": list(sizes)}}
        metadata = {f"qkv.{key}": text for key, text in packed.metadata.items()}
        source = offload.loading.Source("x", sd, metadata=metadata) if metadata else sd
        if metadata:
            continue  # a dictionary has none
        offload.load_model_data(model, source, fused_split_map=split, default_dtype=torch.float32)
        numbers = torch.cat([layer.weight + 0 for layer in (model.q, model.k, model.v)])
        assert steps_apart(numbers, expected[packed.name].reshape(packed.shape)) <= ulps, packed.name
        assert torch.equal(model.k.bias, sd["qkv.bias"][third : 2 * third])
        kinds.add(type(model.k))
    assert kinds <= {QuantLinear, nn.Linear}
    if name in ("fp8", "int8"):
        assert QuantLinear in kinds


def test_an_adapter_works_on_a_part_of_a_fused_weight() -> None:
    parts = int8_parts(48, 32, "qkv.weight")
    model = Split(32, (16, 16, 16))
    sd = {**parts, "qkv.bias": torch.zeros(48)}
    offload.load_model_data(model, sd, fused_split_map={"qkv": ["q", "k", "v"]}, default_dtype=torch.float32)
    x, down, up = torch.randn(2, 32), torch.randn(4, 32), torch.randn(16, 4)
    have = model.k(x) + F.linear(F.linear(x, down), up)
    want = F.linear(x, int8_numbers(parts, "qkv.weight")[16:32] + up @ down)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


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


def test_a_saved_model_says_all_that_it_needs(tmp_path: Path) -> None:
    found, _, _ = corpus("quanto")
    whole = {name: one for name, one in found.packed.items() if len(one.shape) == 2}
    model = nn.ModuleDict(
        {
            str(number): QuantLinear.from_parts(one.weight, one.parts, hints=one.hints)
            for number, one in enumerate(whole.values())
        }
    )
    model._config = {"width": 3}
    offload.save_model(model, tmp_path / "q.safetensors")
    (metadata,) = Checkpoint.open([str(tmp_path / "q.safetensors")]).metadata()
    assert metadata["quantization_format"] == "quanto"
    sd, kinds, _ = offload.load_sd(tmp_path / "q.safetensors")
    assert set(kinds) == set(model) and {kind["activations"] for kind in kinds.values()} == {"none"}
    assert {kind["weights"] for kind in kinds.values()} <= {"qint8", "qint4", "qint2", "qfloat8", "qfloat8_e5m2"}
    for name, layer in model.items():
        # As the readers of this layout look for it.
        assert any(key.startswith(f"{name}.weight._data") for key in sd) and f"{name}.weight._scale" in sd
        assert sd[f"{name}.input_scale"].shape == sd[f"{name}.output_scale"].shape == ()


def test_a_layer_that_no_file_could_describe_is_not_saved(tmp_path: Path) -> None:
    found, _, _ = corpus("bnb")
    packed = next(one for one in found.packed.values() if one.hints and len(one.shape) == 2)
    layer = QuantLinear.from_parts(packed.weight, packed.parts)  # without the state that says what the bytes are
    with pytest.raises(NotAvailableError, match="would not say|cannot be saved packed"):
        offload.save_model(nn.Sequential(layer), tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_the_official_reader_opens_what_is_saved(tmp_path: Path) -> None:
    official = pytest.importorskip("safetensors.torch")
    file, _ = quantized(ALL)
    model = empty()
    offload.load_model_data(model, file)
    offload.save_model(model, tmp_path / "x.safetensors")
    theirs = official.load_file(tmp_path / "x.safetensors")
    for name in ("blocks.0.weight", "blocks.0.weight_scale", "embed.weight"):
        assert theirs[name].dtype == file[name].dtype and torch.equal(bits(theirs[name]), bits(file[name]))


def test_markers_in_metadata_are_followed(tmp_path: Path) -> None:
    rotated = next(one for one in corpus("rotation")[0].packed.values())
    sd = {f"net.fc.{local}": tensor for local, tensor in rotated.parts.items()}
    ((_, group),) = rotated.weight.transforms
    layers = {"fc": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"net.fc": layers["fc"]}})}
    path = write(tmp_path / "x.safetensors", sd, metadata)
    model = nn.ModuleDict({"fc": nn.Linear(512, 6, bias=False, device="meta")})
    offload.load_model_data(model, path, modelPrefix="net")
    assert model["fc"].quant_weight.transforms == [("Hadamard", group)]


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
