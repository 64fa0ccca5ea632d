"""Adapters on layers of other libraries, in modules that read their parts' weights, under hooks and autocast, and beside PEFT's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import adapter, assert_close, inputs, merged, model
from safetensors.torch import save_file
from test_quantized_modules import package
from torch import Tensor, nn

import weightstream
from weightstream import StateError, offload


def low_rank(layers: dict[str, nn.Module], seed: int = 0, rank: int = 4) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An adapter for linear layers by name, and its deltas."""
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, layer in layers.items():
        down = torch.randn(rank, layer.in_features, generator=generator) * 0.2
        up = torch.randn(layer.out_features, rank, generator=generator) * 0.2
        tensors.update({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
        deltas[name] = up @ down
    return tensors, deltas


def load(made: nn.Module, tensors: dict[str, Tensor], folder: Path, multiplier: Any = 1.0) -> None:
    path = str(folder / "adapter.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    assert offload.load_loras_into_model(made, path, [multiplier]) == [path], made._loras_errors


@pytest.mark.parametrize("train", [False, True])
def test_parts_of_modules_that_read_their_weights_themselves(train: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)}).train(train)
    layer = made["layer"]
    reference = copy.deepcopy(layer)
    tensors, deltas = low_rank({f"layer.{name}": layer.get_submodule(name) for name in ("linear1", "linear2")})
    more, other = low_rank({"layer.self_attn.out_proj": layer.self_attn.out_proj}, 1)
    packed = torch.randn(96, 32) * 0.1
    norm = torch.randn(32)
    tensors |= {**more, "layer.self_attn.in_proj_weight.diff": packed, "layer.norm1.diff": norm}
    with torch.no_grad():
        for name, delta in {**deltas, **other}.items():
            reference.get_submodule(name.removeprefix("layer.")).weight += 0.5 * delta
        reference.self_attn.in_proj_weight += 0.5 * packed
        reference.norm1.weight += 0.5 * norm
    x = torch.randn(2, 5, 32)
    plain = run(layer, x)
    load(made, tensors, tmp_path, [0.5, 0.0])
    assert torch.allclose(run(layer, x), run(reference, x), atol=1e-5)
    assert not torch.allclose(run(layer, x), plain, atol=1e-3)
    offload.set_step_no_for_lora(made, 1)
    assert same_bits(run(layer, x), plain)
    offload.unload_loras_from_model(made)
    assert same_bits(run(layer, x), plain) and "forward" not in layer.__dict__


def test_what_no_adapter_can_change_is_refused_by_name(tmp_path: Path) -> None:
    class Scaled(nn.Embedding):
        def forward(self, index: Tensor) -> Tensor:
            return super().forward(index) * 8

    made = nn.ModuleDict({"rnn": nn.LSTM(8, 8), "embed": Scaled(5, 8)})
    for key, shape, reason in (
        ("rnn.weight_ih_l0.diff", (32, 8), "LSTM"),
        ("embed.diff", (5, 8), "forward of its own"),
    ):
        path = str(tmp_path / "a.safetensors")
        save_file({key: torch.ones(shape)}, path)
        assert offload.load_loras_into_model(made, path) == []
        ((_, text),) = made._loras_errors
        assert reason in text and key.removesuffix(".diff") in text


def test_transposed_layers_of_transformers(tmp_path: Path) -> None:
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    torch.manual_seed(0)
    made = nn.ModuleDict({"c": conv1d(48, 32)})
    down, up, length = torch.randn(4, 32) * 0.2, torch.randn(48, 4) * 0.2, torch.rand(48) + 0.5
    x = torch.randn(3, 32)
    weight, bias = made["c"].weight.t().double(), made["c"].bias.double()
    load(made, {"c.lora_A.weight": down, "c.lora_B.weight": up, "c.lora_magnitude_vector": length}, tmp_path)
    moved = weight + up.double() @ down.double()
    wanted = x.double() @ (moved / moved.norm(dim=1, keepdim=True) * length.double()[:, None]).t() + bias
    assert torch.allclose(run(made["c"], x).double(), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha of a high rank", "conv", "conv dora", "oft"])
def test_under_autocast(kind: str, tmp_path: Path) -> None:
    made, x, given = model(), inputs(), adapter(kind)
    wanted = run(merged(made, (given, 0.5)), x)
    offload.load_loras_into_model(made, given.write(tmp_path / "a.safetensors"), [0.5])
    with torch.autocast("cpu", torch.bfloat16):
        got = run(made, x)
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 3e-2


def test_float16_factors_of_unlike_size_do_not_overflow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = nn.ModuleDict({"up": nn.Linear(64, 64).half()})
    down, up = torch.randn(4, 64) * 3000, torch.randn(64, 4) / 3000
    x = torch.randn(5, 64).half() * 4
    wanted = x.double() @ (made["up"].weight.double() + up.double() @ down.double()).t() + made["up"].bias.double()
    load(made, {"up.lora_A.weight": down, "up.lora_B.weight": up}, tmp_path)
    got = run(made["up"], x)
    assert got.dtype == torch.float16
    assert float((got.double() - wanted).detach().abs().max() / wanted.detach().abs().max()) < 5e-3


def torchao(layer: nn.Linear) -> nn.Linear:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def quanto(layer: nn.Linear) -> nn.Module:
    library = package("optimum.quanto")
    packed = library.QLinear.from_module(layer, weights=library.qint8)
    packed.freeze()
    return packed


def gguf(layer: nn.Linear) -> nn.Module:
    quantizers = pytest.importorskip("diffusers.quantizers.gguf.utils")
    library = pytest.importorskip("gguf")
    kind = library.GGMLQuantizationType["Q8_0"]
    blocks = torch.from_numpy(library.quants.quantize(layer.weight.detach().float().numpy(), kind).copy())
    made = quantizers.GGUFLinear(layer.in_features, layer.out_features, True, compute_dtype=torch.float32)
    made.weight = quantizers.GGUFParameter(blocks, quant_type=kind)
    made.bias = layer.bias
    return made


def unknown(layer: nn.Linear) -> nn.Module:
    class Packed(nn.Linear):
        """A layer whose weight nobody else can unpack."""

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) / 64, self.bias)

    made = Packed(layer.in_features, layer.out_features)
    made.weight = nn.Parameter((layer.weight.detach() * 64).round().to(torch.int8), requires_grad=False)
    made.bias = layer.bias
    return made


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "dora by column", "lokr", "oft"])
@pytest.mark.parametrize("library", [torchao, quanto, gguf, unknown])
def test_layers_of_other_libraries(
    library: Callable[[nn.Linear], nn.Module], kind: str, streams: bool, tmp_path: Path
) -> None:
    made, x, given = model(), inputs(), adapter(kind)
    for block in made.blocks:
        block.up = library(block.up).eval()
    reference, one = model(), torch.eye(32)
    for block, other in zip(made.blocks, reference.blocks):
        other.up = nn.Linear(32, 64)
        other.up.bias = block.up.bias
        other.up.weight = nn.Parameter((run(block.up, one) - block.up.bias).t().clone(), requires_grad=False)
    wanted, plain = run(merged(reference, (given, 0.5)), x), run(made, x)
    path = given.write(tmp_path / "a.safetensors")
    attachment = weightstream.attach(made, device=host(), budget=weight_bytes(made)) if streams else None
    assert offload.load_loras_into_model(made, [path], [0.5]) == [path], made._loras_errors
    for _ in range(3):
        got = run(made, x)
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 1e-4
    offload.unload_loras_from_model(made)
    assert same_bits(run(made, x), plain)
    if attachment is not None:
        attachment.detach()


def test_beneath_hooks_of_accelerate(tmp_path: Path) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    made, x = model(), inputs()
    files = [adapter("lora"), adapter("dora", 1)]
    wanted, plain = run(merged(made, *((one, 0.5) for one in files)), x), run(made, x)
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    for first in ("hook", "adapter"):
        for step in ("hook", "adapter") if first == "hook" else ("adapter", "hook"):
            if step == "hook":
                hook = hooks.AlignDevicesHook("cpu", offload=True, io_same_device=True)
                hooks.add_hook_to_module(made.blocks[1].up, hook)
            else:
                assert offload.load_loras_into_model(made, paths, [0.5, 0.5]) == paths
        assert made.blocks[1].up.weight.is_meta
        for _ in range(2):
            assert_close(run(made, x), wanted, torch.zeros(0))
        if first == "hook":
            offload.unload_loras_from_model(made)
            assert same_bits(run(made, x), plain)
            hooks.remove_hook_from_module(made.blocks[1].up)
        else:
            hooks.remove_hook_from_module(made.blocks[1].up)
            assert_close(run(made, x), wanted, torch.zeros(0))
            offload.unload_loras_from_model(made)
        assert same_bits(run(made, x), plain)
        made.blocks[1].up.__dict__.pop("forward", None)  # what accelerate leaves: the class's own


def peft_model(made: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(target_modules=["up", "down"], r=4, lora_alpha=2, init_lora_weights=False, **settings)
    return peft.get_peft_model(made, config).eval()


@pytest.mark.parametrize("dora", [False, True])
def test_the_numbers_are_those_of_peft(dora: bool, tmp_path: Path) -> None:
    made, x = model(), inputs()
    reference = peft_model(copy.deepcopy(made), use_dora=dora)
    reference.save_pretrained(tmp_path / "peft")
    wanted = run(reference, x)
    path = str(tmp_path / "peft")
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
    assert float((run(made, x) - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("attach", [False, True])
def test_adapters_of_peft_go_on_working_beside(attach: bool, tmp_path: Path) -> None:
    made, x, given = model(), inputs(), adapter("lora")
    reference = copy.deepcopy(made)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in given.changes:
                parameter.copy_(given.changes[name](parameter.double(), 0.5))
    wanted, alone = run(peft_model(reference), x), run(peft_model(copy.deepcopy(made)), x)
    tuned = peft_model(made)
    assert same_bits(run(tuned, x), alone)
    path = given.write(tmp_path / "a.safetensors")
    attachment = weightstream.attach(tuned, device=host(), budget=weight_bytes(tuned)) if attach else None
    for target in (tuned, made) if not attach else (tuned,):
        for _ in range(2):
            assert same_bits(run(tuned, x), alone)
        assert offload.load_loras_into_model(target, [path], [0.5]) == [path], target._loras_errors
        for _ in range(3):
            assert torch.allclose(run(tuned, x), wanted, atol=1e-5)
        with tuned.disable_adapter():
            assert_close(run(tuned, x), run(merged(model(), (given, 0.5)), x), torch.zeros(0))
        assert torch.allclose(run(tuned, x), wanted, atol=1e-5)
        offload.unload_loras_from_model(target)
    assert same_bits(run(tuned, x), alone)
    if attachment is not None:
        attachment.detach()
        assert same_bits(run(tuned, x), alone)


def test_diffusers_ways_of_loading_name_ours_on_a_managed_model(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    made = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": torch.randn(4, 32), f"{name}.lora_B.weight": torch.randn(32, 4)}
    before = {name for name, _ in made.named_modules()}
    with weightstream.attach(made, device=host(), budget=weight_bytes(made)):
        with pytest.raises(StateError, match=r"offload\.load_loras_into_model"):
            made.load_lora_adapter(tensors)
        with pytest.raises(StateError, match=r"offload\.load_loras_into_model"):
            diffusers.FluxPipeline.load_lora_into_transformer(tensors, {}, made)
        assert {name for name, _ in made.named_modules()} == before
        load(made, tensors, tmp_path)
    assert "load_lora_adapter" not in made.__dict__
