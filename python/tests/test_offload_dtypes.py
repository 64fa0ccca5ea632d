"""Which type each weight gets: the default, `fp32_dtype`, `_lock_dtype`; buffers and integers keep theirs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import empty, same, small, weights, write
from torch import nn

from weightstream import QuantizationError, offload
from weightstream.offload.dtypes import Converter


def types(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file whose weights have several types."""
    sd = dict(weights(small()))
    sd["blocks.0.weight"] = sd["blocks.0.weight"].half()
    sd["blocks.1.weight"] = sd["blocks.1.weight"].double()
    return write(tmp_path / "x.safetensors", sd)


def load(path: Path, **options: Any) -> nn.Module:
    model = options.pop("model", None) or empty()
    offload.load_model_data(model, path, **options)
    return model


def test_the_default_is_bfloat16_for_all_floating_parameters(mixed: Path) -> None:
    model = load(mixed)
    found = types(model)
    buffers = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert {found[name] for name in found if name not in buffers} == {torch.bfloat16}
    assert found["norm.running_mean"] == torch.float32 and found["norm.num_batches_tracked"] == torch.int64
    assert same(model.blocks[2].weight.detach(), small().blocks[2].weight.detach().bfloat16())
    assert model.head.weight is model.embed.weight


def test_none_keeps_the_files_types_and_fp32_dtype_changes_float32_only(mixed: Path) -> None:
    found = types(load(mixed, default_dtype=None))
    assert (found["blocks.0.weight"], found["blocks.1.weight"]) == (torch.float16, torch.float64)
    assert found["blocks.2.weight"] == torch.float32
    found = types(load(mixed, default_dtype=None, fp32_dtype=torch.bfloat16))
    assert (found["blocks.0.weight"], found["blocks.1.weight"]) == (torch.float16, torch.float64)
    assert found["blocks.2.weight"] == torch.bfloat16 and found["norm.running_mean"] == torch.float32


def test_locks_count_before_the_default(mixed: Path) -> None:
    model = empty()
    model.blocks[0]._lock_dtype = torch.float32
    model.blocks[1]._lock_dtype = True
    model.blocks[2].bias._lock_dtype = torch.float64
    load(mixed, model=model)
    found = types(model)
    assert found["blocks.0.weight"] == torch.float32 and found["blocks.0.bias"] == torch.float32
    assert found["blocks.1.weight"] == torch.float64 and found["blocks.1.bias"] == torch.float32
    assert found["blocks.2.weight"] == torch.bfloat16 and found["blocks.2.bias"] == torch.float64
    assert model.blocks[2].bias._lock_dtype == torch.float64, "the mark outlives the parameter it was set on"
    again = empty()
    again.norm._lock_dtype = torch.float16
    assert (
        types(load(mixed, model=again, default_dtype=None, fp32_dtype=torch.bfloat16))["norm.weight"] == torch.float16
    )


def test_what_was_changed_in_memory_is_converted_and_not_the_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = nn.Linear(2048, 2048)
    offload.save_model(source, tmp_path / "x.safetensors")

    def edit(sd: dict[str, Any]) -> dict[str, Any]:
        sd["weight"][100].numpy()[:] = 3.0
        return sd

    model = nn.Linear(2048, 2048, device="meta")
    offload.load_model_data(model, tmp_path / "x.safetensors", preprocess_sd=edit)
    expected = source.weight.detach().clone()
    expected[100] = 3.0
    assert same(model.weight.detach(), expected.bfloat16())


@pytest.mark.parametrize("shape", [(3000, 3000), (7,), (), (0, 3)])
def test_pieces_equal_the_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    shares: list[float] = []
    converted = Converter(shares.append, tensor.nbytes)("t", tensor, torch.float16)
    assert same(converted, tensor.half())
    if tensor.dim() == 2:
        assert same(Converter(shares.append, tensor.nbytes)("t", tensor.t(), torch.float16), tensor.t().half())
    assert all(0 <= share <= 1 for share in shares)


def test_float8_weights_are_not_cast_as_if_they_were_numbers(tmp_path: Path) -> None:
    sd = {**weights(small()), "blocks.0.weight": torch.rand(4, 4).to(torch.float8_e4m3fn)}
    path = write(tmp_path / "x.safetensors", sd)
    model = empty()
    offload.load_model_data(model, path)
    assert model.blocks[0].format == "FP8 without scales"
    assert torch.equal(model.blocks[0].weight + 0, sd["blocks.0.weight"].bfloat16())
    # Where anything says that FP8 is scaled, a missing scale is not taken for 1.
    marked = {**sd, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    with pytest.raises(QuantizationError, match=r"blocks\.0\.weight.* has no scale"):
        load(write(tmp_path / "y.safetensors", marked))


def test_values_that_become_infinite_are_counted_and_said_aloud(tmp_path: Path) -> None:
    sd = dict(weights(small()))
    sd["blocks.0.weight"] = sd["blocks.0.weight"].clone()
    sd["blocks.0.weight"].view(-1)[:3] = torch.tensor([70000.0, -1e30, torch.inf])
    path = write(tmp_path / "x.safetensors", sd)
    with pytest.warns(UserWarning, match="2 values of blocks.0.weight are too large for float16") as heard:
        model = load(path, default_dtype=torch.float16)
    assert heard[0].filename == __file__
    assert any("became infinite" in note for note in model._weightstream_load["notes"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path)
