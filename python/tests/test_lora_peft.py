"""PEFT's rotations of filters and of embeddings, constrained ones, and DoRA of embeddings: beside what PEFT itself merges and computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import run, same_bits
from lora_models import assert_close
from offload_files import write
from quant_files import int8_parts, only
from safetensors import safe_open
from test_lora_kinds import loaded
from torch import Tensor, nn

from weightstream import offload
from weightstream.compiled import COMPILES
from weightstream.quant import QuantConv2d, QuantEmbedding, QuantLinear

peft = pytest.importorskip("peft")
BLOCKS = 3
SHARES = (0.5, 0.7, 1.0, 1.5, 2.5, 5, 9)
"""Of the weights, that are tried as budgets."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 8, 3, stride=1, padding=1)
        self.point = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.line(x)
        image = x.unflatten(1, (4, 5)).permute(0, 3, 1, 2)
        return x + (self.conv(image) + self.point(image)).permute(0, 2, 3, 1).flatten(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(8, 6)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(base: str) -> Net:
    torch.manual_seed(3)
    made = Net().eval().requires_grad_(False)
    if base == "f32":
        return made
    made = made.bfloat16()
    if base == "int8":
        packed = only(int8_parts(24, 8))
        made.embed = QuantEmbedding.from_parts(packed.weight, packed.parts)
        for number, block in enumerate(made.blocks):
            packed = only(int8_parts(8, 8, seed=number))
            block.line = QuantLinear.from_parts(packed.weight, packed.parts, block.line.bias)
            parts = int8_parts(8, 72, seed=9 + number)
            parts = {"weight": parts["weight"].reshape(8, 8, 3, 3), "weight_scale": parts["weight_scale"]}
            packed = only(parts)
            block.conv = QuantConv2d.from_parts(packed.weight, packed.parts, block.conv.bias, like=block.conv)
    return made


def plain64(made: Net) -> Net:
    reference = Net().double().eval().requires_grad_(False)
    for name, parameter in reference.named_parameters():
        owner, _, attribute = name.rpartition(".")
        parameter.copy_(getattr(made.get_submodule(owner), attribute).clone())
    return reference


def inputs() -> Tensor:
    return torch.randint(0, 24, (2, 20), generator=torch.Generator().manual_seed(1))


def _oft(targets: list[str], **options: Any) -> Any:
    return peft.OFTConfig(r=0, oft_block_size=4, target_modules=targets, init_weights=False, **options)


KINDS: dict[str, tuple[Callable[[], Any], float]] = {
    "point": (lambda: _oft(["point"]), 0.1),
    "coft": (lambda: _oft(["line", "point"], coft=True, eps=0.4), 0.1),
    "coft, shared and exact": (
        lambda: _oft(["line"], coft=True, eps=0.3, block_share=True, use_cayley_neumann=False),
        0.1,
    ),
    "coft that is nearly nothing": (lambda: _oft(["line", "embed"], coft=True), 0.1),
    "oft of embeddings": (lambda: _oft(["embed"]), 0.1),
    "coft of embeddings": (lambda: _oft(["embed"], coft=True, eps=0.2), 0.1),
    "boft of filters": (
        lambda: peft.BOFTConfig(boft_block_size=6, target_modules=["conv"], init_weights=False),
        0.3,
    ),
    "dora of embeddings": (
        lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=["embed", "line"], use_dora=True),
        0.3,
    ),
}


def trained(kind: str, made: Net, folder: Path, seed: int = 0) -> tuple[str, Net, Net]:
    """A file of PEFT's with its configuration beside it, the model that PEFT merges in float64, and the plain one."""
    import peft.tuners.boft.layer as boft

    boft.get_fbd_cuda = lambda: None  # nothing is built for a test
    config, scale = KINDS[kind][0](), KINDS[kind][1]
    reference = plain64(made)
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(copy.deepcopy(reference), config).double().eval()
    for key, value in wrapped.named_parameters():
        if any(word in key for word in ("oft_", "lora_")):
            with torch.no_grad():
                near = 1 if "_s." in key or "magnitude" in key else 0
                value.copy_((torch.randn_like(value) * scale + near).float())
    wrapped.save_pretrained(folder)
    x = inputs()
    forward = run(wrapped, x)
    merged = wrapped.merge_and_unload()
    assert float((run(merged, x) - forward).abs().max()) < 1e-5  # PEFT agrees with itself
    return str(folder / "adapter_model.safetensors"), merged, reference


def between(plain: Net, merged: Net, multiplier: float, path: str) -> Net:
    """Where rotations of one stage are so far on their way, and gains after them."""
    made = copy.deepcopy(plain)
    with safe_open(path, "pt") as file:
        gains = {key.split(".boft_s")[0]: file.get_tensor(key).double() for key in file.keys() if "boft_s" in key}
    for name, parameter in made.named_parameters():
        gain = gains.get(f"base_model.model.{name.removesuffix('.weight')}", torch.ones(1)).reshape(-1, 1)
        gain = gain.reshape(-1, *[1] * (parameter.dim() - 1))
        moved = parameter + multiplier * (merged.get_parameter(name) / gain - parameter)
        parameter.copy_(moved * (1 + multiplier * (gain - 1)))
    return made


@pytest.mark.parametrize("where", ["resident", "streamed"])
@pytest.mark.parametrize("base", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_peft_merges_is_computed(kind: str, base: str, where: str, tmp_path: Path) -> None:
    made, x = net(base), inputs()
    plain = run(made, x)
    path, merged, reference = trained(kind, made, tmp_path)
    with loaded(made, where, [path], [[1.0, 0.4, 0.0, 1.0]], SHARES):
        for step in (0, 0, 1, 2, 3):
            offload.set_step_no_for_lora(made, step)
            multiplier = (1.0, 0.4, 0.0, 1.0)[step]
            if multiplier == 1.0:
                assert_close(run(made, x), run(merged, x), plain)
            elif multiplier == 0.0:
                assert "dora" in kind or same_bits(run(made, x), plain)
                assert_close(run(made, x), run(reference, x), plain)
            elif "dora" not in kind:
                assert_close(run(made, x), run(between(reference, merged, multiplier, path), x), plain)
        offload.unload_loras_from_model(made)
        assert same_bits(run(made, x), plain)


@pytest.mark.parametrize("base", ["f32", "int8"])
def test_a_magnitude_of_an_embedding_sees_all_others(base: str, tmp_path: Path) -> None:
    made, x = net(base), inputs()
    plain = run(made, x)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    rotated, turned, _ = trained("oft of embeddings", made, tmp_path / "a")
    factors = {"embed.lora_embedding_A": torch.randn(3, 24) * 0.3, "embed.lora_embedding_B": torch.randn(8, 3) * 0.3}
    magnitude = torch.rand(8) + 1
    decomposed = {**factors, "embed.lora_magnitude_vector": magnitude}
    difference = {"embed.diff": torch.randn(24, 8) * 0.2}
    paths = [
        rotated,
        str(write(tmp_path / "b" / "dora.safetensors", decomposed)),
        str(write(tmp_path / "b" / "diff.safetensors", difference)),
    ]
    assert offload.load_loras_into_model(made, paths, [1.0, 0.5, 0.25]) == paths, made._loras_errors
    reference = turned
    weight = reference.embed.weight.data + 0.25 * difference["embed.diff"].double()
    moved = weight + 0.5 * (factors["embed.lora_embedding_B"].double() @ factors["embed.lora_embedding_A"].double()).t()
    wanted = weight.norm(dim=0) + 0.5 * (magnitude.double() - weight.norm(dim=0))
    reference.embed.weight.data.copy_(wanted * moved / moved.norm(dim=0))
    for _ in range(2):
        assert_close(run(made, x), run(reference, x), plain)


@pytest.mark.skipif(not COMPILES, reason="before PyTorch 2.6 the compiler copies modules")
@pytest.mark.parametrize("kind", ["coft", "coft of embeddings", "boft of filters", "dora of embeddings"])
@pytest.mark.parametrize("base", ["f32", "int8"])
def test_compiled_whole_and_multipliers_compile_nothing_anew(kind: str, base: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    made, x, graphs = net(base), inputs(), []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = run(made, x)
    path, merged, reference = trained(kind, made, tmp_path)
    offload.load_loras_into_model(made, path, [[1.0, 0.0, 1.0]])
    compiled = torch.compile(made, backend=count, fullgraph=True)
    for step, wanted in enumerate((merged, reference, merged)):
        offload.set_step_no_for_lora(made, step)
        assert_close(run(compiled, x), run(wanted, x), plain)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [{"dilation": 2}, {"padding_mode": "circular"}, {"padding": (1, 0)}, {"stride": (1, 2)}, {"padding": "same"}],
)
def test_filters_of_convolutions_that_peft_computes_as_others_are_refused(options: Any, tmp_path: Path) -> None:
    made = nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3, **{"padding": 1, **options})}).requires_grad_(False)
    tensors = {"conv.boft_R": torch.randn(1, 12, 6, 6), "conv.boft_s": torch.ones(1, 8)}
    path = str(write(tmp_path / "a.safetensors", tensors))
    x = torch.randn(1, 8, 9, 9)
    plain = run(made["conv"], x)
    assert offload.load_loras_into_model(made, path) == []
    assert "conv" in made._loras_errors[0][1] and "PEFT computes as another one" in made._loras_errors[0][1]
    assert same_bits(run(made["conv"], x), plain)


def test_a_constraint_of_a_file_without_its_configuration_is_none(tmp_path: Path) -> None:
    made, x = net("f32"), inputs()
    path, merged, _ = trained("coft", made, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "coft": False}))
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
    assert float((run(made, x) - run(merged, x)).abs().max()) > 1e-3
