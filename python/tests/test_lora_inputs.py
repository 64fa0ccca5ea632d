"""Adapters of inputs, of embeddings and of layers that keep their weight the other way around: multipliers of 0 and by step, several on
one layer, parts of fused layers, and what is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import run, same_bits
from lora_models import WIDTH, Adapter, adapter, added, assert_close, inputs, merged, model
from offload_files import write
from test_lora_kinds import loaded
from torch import Tensor, nn

from weightstream import offload

OF_INPUTS = ("peft oft", "peft oft of matrices", "peft boft", "ia3 of inputs", "glora")
KINDS = (*OF_INPUTS, "peft oft of outputs", "ia3 of outputs", "conv glora")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def refused(made: nn.Module, tensors: dict[str, Tensor], folder: Path, config: Any = None) -> str:
    (folder / "adapter_config.json").write_text(json.dumps(config or {}))
    assert offload.load_loras_into_model(made, [str(write(folder / "a.safetensors", tensors))]) == []
    return made._loras_errors[0][1]


@pytest.mark.parametrize("where", ["resident", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_multipliers_of_0_and_by_step(kind: str, where: str, tmp_path: Path) -> None:
    made, x, given = model(), inputs(), adapter(kind)
    plain = run(made, x)
    path = given.write(tmp_path / "a.safetensors")
    with loaded(made, where, [path], [[0.0, 1.0, -0.5, 2.0, 0.0]]):
        for step, multiplier in enumerate((0.0, 1.0, -0.5, 2.0, 0.0)):
            offload.set_step_no_for_lora(made, step)
            if multiplier:
                assert_close(run(made, x), run(merged(made, (given, multiplier)), x), plain)
            else:
                assert same_bits(run(made, x), plain)


@pytest.mark.parametrize("where", ["resident", "streamed"])
@pytest.mark.parametrize("kind", OF_INPUTS)
def test_what_others_add_is_of_the_inputs_as_they_came(kind: str, where: str, tmp_path: Path) -> None:
    made, x = model(), inputs()
    # In the weights those of inputs come first, and a rotation of outputs after them; then what is added.
    applied = [(adapter(kind), 0.7), (adapter("lora", 2), 0.3), (adapter("dora", 3), 0.6)]
    if kind in ("peft oft", "ia3 of inputs"):  # others change outputs too, or add to them
        applied.insert(1, (adapter("oft", 1), 0.5))
    wanted, plain = run(merged(made, *applied), x), run(made, x)
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, (one, _) in enumerate(applied)]
    with loaded(made, where, paths, [multiplier for _, multiplier in applied]):
        for _ in range(2):
            assert_close(run(made, x), wanted, plain)


def test_layers_inside_an_operator_that_reads_their_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)}).eval()
    factors, half = 1 + numbers(64, 1), numbers(4, 16, 16, seed=1)
    reference = copy.deepcopy(made).double()
    skew = (half - half.transpose(1, 2)).double() / 2
    one = torch.eye(16, dtype=torch.float64)
    with torch.no_grad():
        first, second = reference["layer"].linear1, reference["layer"].linear2
        first.weight *= factors.double()
        first.bias *= factors.double().flatten()
        second.weight.copy_(second.weight @ torch.block_diag(*((one - skew) @ torch.linalg.inv(one + skew))).t())
    tensors = {"layer.linear1.ia3_l": factors, "layer.linear2.oft_r": half, "layer.linear2.oft_s": torch.ones(32, 1)}
    path = str(write(tmp_path / "a.safetensors", tensors))
    x = numbers(2, 5, 32, seed=2)
    plain = run(made["layer"], x)
    assert offload.load_loras_into_model(made, [path]) == [path], made._loras_errors
    wanted = run(reference["layer"], x.double())
    assert float((run(made["layer"], x) - wanted).abs().max() / wanted.abs().max()) < 2e-5
    offload.unload_loras_from_model(made)
    assert same_bits(run(made["layer"], x), plain)


@pytest.mark.parametrize("base", ["f32", "bf16"])
@pytest.mark.parametrize("where", ["resident", "streamed"])
@pytest.mark.parametrize("spelling", ["peft", "kohya", "both"])
def test_low_rank_adapters_of_embeddings(spelling: str, where: str, base: str, tmp_path: Path) -> None:
    made, x = model(base), inputs()
    plain = run(made, x)
    applied = []
    for seed in range(2 if spelling == "both" else 1):
        up, down = numbers(40, 3, seed=seed), numbers(3, WIDTH, seed=seed + 5)
        if spelling == "peft" or seed:
            tensors = {
                "base_model.model.embed.lora_embedding_A": up.t(),
                "base_model.model.embed.lora_embedding_B": down.t(),
            }
            delta = up.double() @ down.double()
        else:
            tensors = {"lora_unet_embed.lora_up.weight": up, "lora_unet_embed.lora_down.weight": down}
            tensors["lora_unet_embed.alpha"] = torch.tensor(1.5)
            delta = 0.5 * up.double() @ down.double()
        applied.append((Adapter(tensors, {"embed.weight": added(delta)}), 0.8 - seed))
    applied.append((adapter("lora", 4), 0.5))
    wanted = run(merged(made, *applied), x)
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, (one, _) in enumerate(applied)]
    with loaded(made, where, paths, [multiplier for _, multiplier in applied]):
        for _ in range(2):
            assert_close(run(made, x), wanted, plain)
        offload.activate_loras(made, list(range(len(paths))), [0] * len(paths))
        assert same_bits(run(made, x), plain)


def test_a_difference_of_a_layer_that_keeps_its_weight_as_inputs_by_outputs(tmp_path: Path) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    made = nn.Sequential(conv1d(48, 16), conv1d(48, 48), conv1d(16, 48)).eval().requires_grad_(False)
    tensors = {f"{number}.diff": numbers(*layer.weight.shape, seed=number) for number, layer in enumerate(made)}
    tensors |= {"0.diff_b": numbers(48, seed=7), "1.lora_A.weight": numbers(2, 48), "1.lora_B.weight": numbers(48, 2)}
    x = numbers(5, 16, seed=9)
    plain = run(made, x)
    path = str(write(tmp_path / "a.safetensors", tensors))
    assert offload.load_loras_into_model(made, [path]) == [path], made._loras_errors
    for multiplier in (1.0, 0.4, 0.0):
        reference = nn.Sequential(conv1d(48, 16), conv1d(48, 48), conv1d(16, 48)).double()
        with torch.no_grad():
            for number, layer in enumerate(reference):
                layer.weight.copy_(made[number].weight + multiplier * tensors[f"{number}.diff"].double())
                layer.bias.copy_(made[number].bias)
            reference[0].bias += multiplier * tensors["0.diff_b"].double()
            reference[1].weight += multiplier * (numbers(48, 2).double() @ numbers(2, 48).double()).t()
            wanted = reference(x.double())
        offload.activate_loras(made, [0], [multiplier])
        got = run(made, x)
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-5
        assert multiplier or same_bits(got, plain)
    # Laid out as other linear layers' it is another layer's, or a square one would be taken the wrong way around.
    reason = refused(made, {"0.diff": numbers(48, 16)}, tmp_path)
    assert "[16, 48] fits" in reason, reason


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    fused = nn.Module()
    fused.attn = nn.Module()
    fused.attn.qkv = nn.Linear(16, 48)
    packed = {"attn.to_q.oft_R.weight": numbers(4, 6)}
    assert "to_q" in (reason := refused(fused, packed, tmp_path)) and "part of" in reason, reason
    for part in ("q", "k", "v"):
        factors = {f"attn.to_{one}.ia3_l": 1 + numbers(16, 1) for one in ("q", "k", "v")}
    path = str(write(tmp_path / "b.safetensors", factors))
    assert offload.load_loras_into_model(fused, [path]) == [path], (part, fused._loras_errors)
    convolutions = nn.ModuleDict(
        {"same": nn.Conv2d(8, 8, 3), "grouped": nn.Conv2d(8, 8, 1, groups=2), "line": nn.Linear(8, 8)}
    ).requires_grad_(False)
    same = {"same.ia3_l": 1 + numbers(1, 8, 1, 1)}
    for key, tensors, config, words in (
        ("same", same, None, "feedforward_modules"),
        ("same", same, {"feedforward_modules": ".*same"}, 'the pattern ".*same"'),
        ("same", {"same.oft_R.weight": numbers(9, 28)}, None, "puts back elsewhere"),
        ("same", {"same.oft_R.weight": numbers(9, 28)}, {"peft_type": "OFT"}, "puts back elsewhere"),
        ("grouped", {"grouped.oft_R.weight": numbers(1, 6)}, {"peft_type": "OFT"}, "in groups"),
        ("grouped", {"grouped.oft_R.weight": numbers(1, 6)}, None, "says that PEFT made it"),
        ("line", {"line.oft_R.weight": numbers(2, 6)}, {"coft": True, "eps": "small"}, '"small" ("eps")'),
        ("line", {"line.oft_R.weight": numbers(2, 7)}, None, "none of rotations"),
        ("line", {"line.oft_R.weight": numbers(3, 6)}, None, "[2, 6] fits"),
        ("line", {"line.boft_R": numbers(2, 3, 2, 2), "line.boft_s": numbers(8, 1)}, None, "no 3 blocks"),
        ("line", {"line.ia3_l": numbers(8, 2)}, None, "[8, 1] fits"),
        ("line", {"line.a1.weight": numbers(8, 2), "line.a2.weight": numbers(2, 8)}, None, "no part"),
        ("line", {"line.lora_embedding_A": numbers(2, 8), "line.lora_embedding_B": numbers(8, 2)}, None, "embedding"),
        ("line", {"line.oft_embedding_R.weight": numbers(2, 6)}, None, "embedding"),
    ):
        reason = refused(convolutions, tensors, tmp_path, config)
        assert key in reason and words in reason, (words, reason)
    path = str(write(tmp_path / "a.safetensors", same))
    for names, axis in ((["same"], 1), (["line"], 0)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"feedforward_modules": names}))
        assert offload.load_loras_into_model(convolutions, [path]) == [path], convolutions._loras_errors
        x = numbers(2, 8, 5, 5, seed=3)
        layer = nn.Conv2d(8, 8, 3).double().requires_grad_(False)
        shape = (8, 1, 1, 1) if axis == 0 else (1, 8, 1, 1)
        layer.weight.copy_(convolutions["same"].weight * same["same.ia3_l"].double().reshape(shape))
        bias = convolutions["same"].bias.detach().double()
        layer.bias.copy_(bias * same["same.ia3_l"].double().flatten() if axis == 0 else bias)
        assert float((convolutions["same"](x) - layer(x.double())).abs().max()) < 1e-5
