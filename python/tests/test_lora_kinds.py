"""Every kind of adapter, on every kind of weight, resident and streamed: the model with its deltas merged in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import KINDS, Adapter, adapter, assert_close, inputs, merged, model, whole_differences
from torch import nn

import weightstream
from weightstream import BudgetError, offload

SHARES = (0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2, 3.0)
"""Of the weights, that are tried as budgets."""
BASES = ("f32", "bf16", "fp8", "int8", "gguf")


@contextlib.contextmanager
def loaded(
    made: nn.Module, where: str, paths: list[str], multipliers: list[Any], shares: Sequence[float] = SHARES
) -> Iterator[None]:
    """The model with adapters: in CPU memory, or on an emulated device with the smallest budget that they fit in."""
    if where == "resident":
        assert offload.load_loras_into_model(made, paths, multipliers) == paths, made._loras_errors
        yield
        return
    for share in shares:
        try:
            attachment = weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * share))
            assert offload.load_loras_into_model(made, paths, multipliers) == paths, made._loras_errors
        except BudgetError:
            if made.__dict__.get("_weightstream") is not None:
                attachment.detach()
            continue
        with attachment:
            yield
        return
    raise AssertionError("no budget was enough")


@pytest.mark.parametrize("where", ["resident", "streamed"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_equals_its_merged_weights(kind: str, base: str, where: str, tmp_path: Path) -> None:
    made, x = model(base), inputs()
    given = adapter(kind)
    wanted = {multiplier: run(merged(made, (given, multiplier)), x) for multiplier in (1.0, 0.3)}
    plain = run(made, x)
    path = given.write(tmp_path / "a.safetensors")
    with loaded(made, where, [path], [1.0]):
        for _ in range(3):
            assert_close(run(made, x), wanted[1.0], plain)
        offload.activate_loras(made, [0], [0.3])
        assert_close(run(made, x), wanted[0.3], plain)
        offload.unload_loras_from_model(made)
        assert same_bits(run(made, x), plain)
        assert same_bits(run(made, x), plain)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("where", ["resident", "streamed"])
def test_whole_differences_of_norms_biases_parameters_and_embeddings(base: str, where: str, tmp_path: Path) -> None:
    made, x = model(base), inputs()
    given = whole_differences()
    wanted, plain = run(merged(made, (given, 0.7)), x), run(made, x)
    state = {name: value.clone() for name, value in made.state_dict().items()}
    path = given.write(tmp_path / "a.safetensors")
    with loaded(made, where, [path], [0.7]):
        for _ in range(3):
            assert_close(run(made, x), wanted, plain)
        for name, value in made.state_dict().items():
            assert same_bits(value.cpu(), state[name]), name
        offload.activate_loras(made, [0], [0])
        assert same_bits(run(made, x), plain)


def mixture() -> list[tuple[Adapter, float]]:
    kinds = ("lora", "dora", "lokr", "conv", "loha of a high rank", "conv dora by column", "diff", "oft", "conv lokr")
    made = [(adapter(kind, seed), 0.2 + seed / 20) for seed, kind in enumerate(kinds)]
    return [*made, (whole_differences(), 0.5)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("where", ["resident", "streamed"])
def test_all_kinds_together(base: str, where: str, tmp_path: Path) -> None:
    made, x = model(base), inputs()
    applied = [entry for entry in mixture() if entry[0].changes]
    # Rotations are of the layer's own outputs, whatever else is added to them.
    rotation = applied.pop(next(at for at, (one, _) in enumerate(applied) if any("oft" in key for key in one.tensors)))
    applied.insert(0, rotation)
    wanted, plain = run(merged(made, *applied), x), run(made, x)
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, (one, _) in enumerate(applied)]
    with loaded(made, where, paths, [multiplier for _, multiplier in applied]):
        for _ in range(3):
            assert_close(run(made, x), wanted, plain)


def test_adapters_in_other_types(tmp_path: Path) -> None:
    x = inputs()
    for base in ("f32", "bf16"):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
            made, given = model(base), adapter("lora")
            given.tensors = {
                key: tensor if key.endswith("alpha") else tensor.to(dtype) for key, tensor in given.tensors.items()
            }
            rounded = {key: tensor.double() for key, tensor in given.tensors.items()}
            for name in given.changes:
                start = name.removesuffix("weight")
                delta = 0.5 * rounded[start + "lora_up.weight"] @ rounded[start + "lora_down.weight"]
                given.changes[name] = lambda weight, multiplier, delta=delta: weight + multiplier * delta
            wanted, plain = run(merged(made, (given, 1.0)), x), run(made, x)
            path = given.write(tmp_path / "a.safetensors")
            assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
            assert_close(run(made, x), wanted, plain)


def test_a_base_of_plain_8_bit_floats(tmp_path: Path) -> None:
    made, x = model("bf16"), inputs()
    for block in made.blocks:
        for layer in (block.up, block.down):
            layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    given = adapter("lora")
    like = model("bf16")
    like.load_state_dict({key: value.to(torch.bfloat16) for key, value in made.state_dict().items()})
    wanted, plain = run(merged(like, (given, 0.5)), x), run(like, x)
    path = given.write(tmp_path / "a.safetensors")
    for where in ("resident", "streamed"):
        with loaded(made, where, [path], [0.5]):
            assert_close(run(made, x), wanted, plain)
            offload.activate_loras(made, [0], [0.0])
            assert_close(run(made, x), run(merged(like), x), plain)
            offload.unload_loras_from_model(made)
