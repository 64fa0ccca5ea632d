"""Files of real trainers' spellings from end to end: what the layers compute, not what a plan says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from attach_models import run, same_bits
from offload_files import write
from torch import Tensor, nn

from weightstream import offload


def load(made: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    path = str(write(folder / "adapter.safetensors", {key: tensor.contiguous() for key, tensor in tensors.items()}))
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) * self.v(x))


class Wan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"self_attn": Attention(), "cross_attn": Attention(), "ffn": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))})
            for _ in range(12)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["ffn"](block["cross_attn"](block["self_attn"](x)))
        return x


def test_half_flattened_names_are_all_the_same_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, x = Wan().eval(), torch.randn(2, 32)
    plain = run(made, x)
    down, up, alpha = torch.randn(4, 32).bfloat16(), torch.randn(32, 4).bfloat16(), torch.tensor(2.0)
    outputs = []
    for start, ends in (
        ("lora_unet_blocks_1.self_attn.k", ("lora_down", "lora_up")),
        ("lora_unet_blocks_1_self_attn_k", ("lora_down", "lora_up")),
        ("lora_unet__blocks_1_self_attn_k", ("lora_down", "lora_up")),
        ("diffusion_model.blocks.1.self_attn.k", ("lora_A", "lora_B")),
        ("transformer.blocks.1.self_attn.k", ("lora_A.default", "lora_B.default")),
        ("base_model.model.blocks.1.self_attn.k", ("lora_A", "lora_B")),
        ("blocks.1.self_attn.k", ("lora.down", "lora.up")),
    ):
        tensors = {f"{start}.{ends[0]}.weight": down, f"{start}.{ends[1]}.weight": up, f"{start}.alpha": alpha}
        keys = list(tensors)
        random.Random(1).shuffle(keys)
        load(made, {key: tensors[key] for key in keys}, tmp_path)
        outputs.append(run(made, x))
    assert all(same_bits(output, outputs[0]) for output in outputs) and not same_bits(outputs[0], plain)
    with torch.no_grad():
        made.blocks[1]["self_attn"].k.weight += 0.5 * (up.float() @ down.float())
    offload.unload_loras_from_model(made)
    assert torch.allclose(run(made, x), outputs[0], atol=1e-4)


@pytest.mark.parametrize("rank", [3, 4, 5, 12])
def test_the_lower_factor_of_a_fused_layer_stays_whole(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(rank)
    down, up, alpha = torch.randn(rank, 8), torch.randn(24, rank), torch.tensor(float(rank) / 2)
    x = torch.randn(3, 8)
    tensors = {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": down,
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": up,
        "lora_unet_double_blocks_0_img_attn_qkv.alpha": alpha,
    }
    delta = x @ (0.5 * up @ down).t()
    fused = nn.ModuleDict(
        {"double_blocks": nn.ModuleList([nn.ModuleDict({"img_attn": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})])}
    )
    layer = fused["double_blocks"][0]["img_attn"]["qkv"]
    plain = run(layer, x)
    load(fused, tensors, tmp_path)
    assert torch.allclose(run(layer, x), plain + delta, atol=1e-5)

    attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("to_q", "to_k", "to_v")})
    split = nn.ModuleDict({"transformer_blocks": nn.ModuleList([nn.ModuleDict({"attn": attention})])})
    before = [run(attention[name], x) for name in ("to_q", "to_k", "to_v")]
    load(split, tensors, tmp_path)
    after = torch.cat([run(attention[name], x) - plain for name, plain in zip(("to_q", "to_k", "to_v"), before)], 1)
    assert torch.allclose(after, delta, atol=1e-5)


def test_a_kronecker_adapter_of_a_fused_layer_fits_its_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two, x = torch.randn(4, 4), torch.randn(24, 8), torch.randn(3, 32)
    tensors = {
        f"attn.qkv.{key}": value for key, value in {"lokr_w1": one, "lokr_w2": two, "alpha": torch.tensor(1e10)}.items()
    }
    delta = x @ torch.kron(one, two).t()
    split = nn.ModuleDict({"attn": nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q", "k", "v")})})
    parts = split["attn"]
    before = [run(parts[name], x) for name in "qkv"]
    load(split, tensors, tmp_path)
    after = torch.cat([run(parts[name], x) - plain for name, plain in zip("qkv", before)], 1)
    assert torch.allclose(after, delta, atol=1e-4)


def test_dora_on_parts_of_a_fused_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fused, x = nn.ModuleDict({"attn": nn.ModuleDict({"to_qkv": nn.Linear(32, 96)})}), torch.randn(3, 32)
    layer = fused["attn"]["to_qkv"]
    tensors, rows = {}, []
    weight = layer.weight.detach().double()
    for number, name in enumerate(("to_q", "to_k", "to_v")):
        down, up, length = torch.randn(4, 32) * 0.2, torch.randn(32, 4) * 0.2, torch.rand(32) + 0.5
        start = f"transformer.attn.{name}"
        tensors |= {
            f"{start}.lora_A.weight": down,
            f"{start}.lora_B.weight": up,
            f"{start}.lora_magnitude_vector": length,
        }
        moved = weight[32 * number : 32 * number + 32] + up.double() @ down.double()
        rows.append(length.double()[:, None] * moved / moved.norm(dim=1, keepdim=True))
    load(fused, tensors, tmp_path)
    wanted = x.double() @ torch.cat(rows).t() + layer.bias.double()
    assert torch.allclose(run(layer, x).double(), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_saturate_and_never_become_nan(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)

        def forward(self) -> Tensor:
            return self.numbers.float()

    made = nn.ModuleDict({"table": Table(), "up": nn.Linear(32, 32, dtype=torch.bfloat16)})
    made["up"].weight = nn.Parameter(torch.full((32, 32), 400.0).to(dtype), requires_grad=False)
    down, up = torch.full((4, 32), 8.0).to(dtype), torch.full((32, 4), 8.0).to(dtype)
    tensors = {"table.numbers.diff": torch.full((4,), 1e5), "up.lora_A.weight": down, "up.lora_B.weight": up}
    load(made, tensors, tmp_path)
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    made.requires_grad_(False)
    wanted = 32 * (float(made["up"].weight[0, 0].float()) + 4 * 64) + float(made["up"].bias[0])
    assert abs(float(run(made["up"], x)[0, 0]) - wanted) < 0.01 * wanted
    assert run(made["table"]).tolist() == [torch.finfo(dtype).max] * 4
