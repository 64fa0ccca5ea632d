"""A small model with a layer of every kind that adapters change, adapters of every kind for it, and what it computes with their
deltas merged into its weights in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from lora_input_models import glora, ia3_inputs, ia3_outputs, peft_boft, peft_oft, peft_oft_matrices, peft_oft_outputs
from offload_files import write
from quant_files import fp8_parts, int8_parts, only
from torch import Tensor, nn
from torch.nn import functional as F

from weightstream import _native
from weightstream.quant import QuantLinear

WIDTH = 32
Deltas = dict[str, Tensor]
Change = Callable[[Tensor, float], Tensor]
"""From a parameter in float64 and a multiplier to what it becomes."""


class Block(nn.Module):
    """Linear layers, a convolution, a norm and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=1)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.modulation = nn.Parameter(torch.randn(1, 2, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.modulation.unbind(1)
        y = self.up(self.norm(x) * (1 + scale) + shift)
        y = y + self.mix(F.gelu(y).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(y))


class Model(nn.Module):
    """A tower between an embedding and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(seed: int = 1) -> Tensor:
    """What it takes."""
    return torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(seed))


def model(base: str = "f32", blocks: int = 4, seed: int = 0) -> Model:
    """The model with weights of a kind: f32, bf16, or packed linear layers in the blocks beside bfloat16."""
    torch.manual_seed(seed)
    made = Model(blocks).eval().requires_grad_(False)
    if base == "f32":
        return made
    made = made.bfloat16()
    if base != "bf16":
        for number, block in enumerate(made.blocks):
            for name in ("up", "down"):
                layer = getattr(block, name)
                setattr(block, name, _packed(base, layer, 10 * number + len(name)))
    return made


def _q8_0(numbers: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers: a scale in float16, then as many int8."""
    groups = numbers.reshape(-1, 32)
    scales = (groups.abs().amax(1, keepdim=True) / 127).half()
    values = (groups / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], 1)


def _packed(kind: str, layer: nn.Linear, seed: int) -> QuantLinear:
    rows, columns = layer.weight.shape
    make = {"fp8": fp8_parts, "int8": int8_parts}.get(kind)
    if make is not None:
        packed = only(make(rows, columns, seed=seed))
        return QuantLinear.from_parts(packed.weight, packed.parts, layer.bias)
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    blocks = _q8_0(numbers)
    ((weight, _),), _, _ = _native.quant_detect([("weight", "Q8_0", [rows, columns])], {}, lambda name: b"", [])
    return QuantLinear.from_parts(weight, {"weight": blocks.reshape(-1)}, layer.bias)


class Adapter:
    """One adapter file: its tensors by key, and what it makes of parameters."""

    def __init__(self, tensors: Mapping[str, Tensor], changes: Mapping[str, Change]) -> None:
        self.tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        self.changes = dict(changes)

    def write(self, path: Path, metadata: Optional[dict[str, str]] = None) -> str:
        """Its file."""
        return str(write(path, self.tensors, metadata))


def merged(given: nn.Module, *applied: tuple[Adapter, float]) -> Model:
    """The model in float64 with the adapters in its weights, those with a magnitude last."""
    made = plain64(given)
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for last in (False, True):
            for adapter, multiplier in applied:
                for name, change in adapter.changes.items():
                    if getattr(change, "last", False) is last:
                        parameters[name].copy_(change(parameters[name], multiplier))
    return made


def plain64(given: Any) -> Model:
    """The same numbers in float64."""
    made = Model(len(given.blocks)).double().eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            owner, _, attribute = name.rpartition(".")
            # An operator reads the numbers of a packed weight.
            parameter.copy_(getattr(given.get_submodule(owner), attribute).clone())
    return made


def added(delta: Tensor) -> Change:
    """A delta that is added."""
    return lambda weight, multiplier: weight + multiplier * delta.double().reshape(weight.shape)


def decomposed(delta: Tensor, magnitude: Tensor, axis: int) -> Change:
    """DoRA, by its definition."""

    def change(weight: Tensor, multiplier: float) -> Tensor:
        others = [dim for dim in range(weight.dim()) if dim != axis]

        def length(numbers: Tensor) -> Tensor:
            return numbers.square().sum(others, keepdim=True).sqrt()

        before = length(weight)
        moved = weight + multiplier * delta.double().reshape(weight.shape)
        wanted = before + multiplier * (magnitude.double().reshape(before.shape) - before)
        return wanted * moved / length(moved)

    change.last = True
    return change


def rotated(blocks: Tensor, multiplier_of: Callable[[float], float] = lambda m: m) -> Change:
    """Rotations of blocks of outputs by Cayley's formula."""
    skew = (blocks - blocks.transpose(1, 2)).double()
    one = torch.eye(skew.shape[-1], dtype=torch.float64)
    turned = (one + skew) @ torch.linalg.inv(one - skew)

    def change(weight: Tensor, multiplier: float) -> Tensor:
        parts = weight.reshape(*skew.shape[:2], -1)
        moved = torch.einsum("knm,knj->kmj", turned - one, parts)
        return weight + multiplier_of(multiplier) * moved.reshape(weight.shape)

    return change


LINEAR = ("up", "down")
SHAPES = {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH), "mix": (2 * WIDTH, 2 * WIDTH, 3)}


def adapter(kind: str, seed: int = 0, blocks: Iterable[int] = range(4), prefix: str = "") -> Adapter:
    """An adapter of a kind for these blocks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: dict[str, Tensor] = {}
    changes: dict[str, Change] = {}
    for number in blocks:
        for layer in ("mix",) if kind.startswith("conv") else LINEAR:
            name = f"blocks.{number}.{layer}"
            made, change = KINDS[kind](random, SHAPES[layer])
            tensors.update({f"{prefix}{name}.{key}": tensor for key, tensor in made.items()})
            changes[f"{name}.weight"] = change
            if hasattr(change, "bias") and layer == "up":
                changes[f"{name}.bias"] = change.bias
    return Adapter(tensors, changes)


def whole_differences(seed: int = 0) -> Adapter:
    """Differences to all that takes nothing else: norms, biases, a parameter, an embedding."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "blocks.0.norm.diff": ("blocks.0.norm.weight", (WIDTH,)),
        "blocks.0.norm.diff_b": ("blocks.0.norm.bias", (WIDTH,)),
        "blocks.1.up.diff_b": ("blocks.1.up.bias", (2 * WIDTH,)),
        "blocks.1.mix.diff_b": ("blocks.1.mix.bias", (2 * WIDTH,)),
        "blocks.2.modulation.diff": ("blocks.2.modulation", (1, 2, WIDTH)),
        "embed.diff": ("embed.weight", (40, WIDTH)),
    }
    tensors = {key: torch.randn(*shape, generator=generator) * 0.3 for key, (_, shape) in shapes.items()}
    return Adapter(tensors, {name: added(tensors[key]) for key, (name, _) in shapes.items()})


Random = Callable[..., Tensor]
Made = tuple[dict[str, Tensor], Change]


def _lora(
    random: Random, shape: tuple[int, ...], rank: int = 4, alpha: float = 2.0
) -> tuple[dict[str, Tensor], Tensor]:
    down, up = random(rank, *shape[1:]), random(shape[0], rank, *[1] * (len(shape) - 2))
    delta = alpha / rank * (up.reshape(shape[0], rank).double() @ down.reshape(rank, -1).double())
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(alpha)}, delta


def _plain(random: Random, shape: tuple[int, ...]) -> Made:
    tensors, delta = _lora(random, shape)
    return tensors, added(delta)


def _dora(axis: int) -> Callable[[Random, tuple[int, ...]], Made]:
    def make(random: Random, shape: tuple[int, ...]) -> Made:
        tensors, delta = _lora(random, shape)
        sizes = [shape[0], 1] if axis == 0 else [1, shape[1]]
        magnitude = (1 + random(shape[axis])).abs().reshape(*sizes, *[1] * (len(shape) - 2))
        tensors["dora_scale"] = magnitude
        return tensors, decomposed(delta, magnitude, axis)

    return make


def _lokr(random: Random, shape: tuple[int, ...]) -> Made:
    one, two = random(4, 4), random(shape[0] // 4, shape[1] // 4, *shape[2:])
    return {"lokr_w1": one, "lokr_w2": two, "alpha": torch.tensor(1e10)}, added(_kron(one, two))


def _lokr_factors(random: Random, shape: tuple[int, ...]) -> Made:
    one = [random(4, 2), random(2, 4)]
    two = [random(shape[0] // 4, 2), random(2, shape[1] // 4)]
    tensors = {"lokr_w1_a": one[0], "lokr_w1_b": one[1], "lokr_w2_a": two[0], "lokr_w2_b": two[1]}
    tensors["alpha"] = torch.tensor(1.0)
    return tensors, added(0.5 * _kron(one[0] @ one[1], two[0] @ two[1]))


def _kron(one: Tensor, two: Tensor) -> Tensor:
    return torch.kron(one.double().reshape(*one.shape, *[1] * (two.dim() - 2)), two.double())


def _loha(rank: int) -> Callable[[Random, tuple[int, ...]], Made]:
    def make(random: Random, shape: tuple[int, ...]) -> Made:
        columns = shape[1] * (shape[2] if len(shape) > 2 else 1)
        parts = [random(shape[0], rank), random(rank, columns), random(shape[0], rank), random(rank, columns)]
        names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        one, two = parts[0].double() @ parts[1].double(), parts[2].double() @ parts[3].double()
        return {**dict(zip(names, parts)), "alpha": torch.tensor(rank / 2)}, added(0.5 * one * two)

    return make


def _oft(random: Random, shape: tuple[int, ...]) -> Made:
    blocks = random(4, shape[0] // 4, shape[0] // 4, scale=0.05)
    return {"oft_blocks": blocks, "alpha": torch.tensor(0.0)}, rotated(blocks)


def _diff(random: Random, shape: tuple[int, ...]) -> Made:
    delta = random(*shape)
    return {"diff": delta}, added(delta)


def _mid(random: Random, shape: tuple[int, ...]) -> Made:
    down, mid, up = random(4, shape[1], 1), random(4, 4, shape[2]), random(shape[0], 4, 1)
    delta = torch.einsum("or,rsk,si->oik", up[..., 0].double(), mid.double(), down[..., 0].double())
    tensors = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(2.0)}
    return tensors, added(0.5 * delta)


KINDS: dict[str, Any] = {
    "lora": _plain,
    "dora": _dora(0),
    "dora by column": _dora(1),
    "lokr": _lokr,
    "lokr of factors": _lokr_factors,
    "loha": _loha(2),
    "loha of a high rank": _loha(9),
    "oft": _oft,
    "diff": _diff,
    "conv": _plain,
    "conv with a core": _mid,
    "conv dora": _dora(0),
    "conv dora by column": _dora(1),
    "conv lokr": _lokr,
    "conv loha": _loha(2),
    "conv diff": _diff,
    "conv oft": _oft,
    "peft oft": peft_oft,
    "peft oft of matrices": peft_oft_matrices,
    "peft oft of outputs": peft_oft_outputs,
    "peft boft": peft_boft,
    "ia3 of inputs": ia3_inputs,
    "ia3 of outputs": ia3_outputs,
    "glora": glora,
    "conv glora": glora,
}
"""Every kind, for linear layers and for convolutions."""


def assert_close(got: Tensor, wanted: Tensor, like: Tensor) -> None:
    """Equal within the precision of the type that `like` was computed in."""
    assert got.dtype == like.dtype
    step = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[like.dtype]
    apart = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert float(apart) < step, float(apart)


def copied(given: Model) -> Model:
    """A copy of the model."""
    return copy.deepcopy(given)
