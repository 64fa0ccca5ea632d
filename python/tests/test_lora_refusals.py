"""Files that cannot be right: numbers that are none, whole checkpoints, headers without a number. Each is refused by name, and the
model computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import adapter, inputs, model
from offload_files import write
from torch import Tensor

import weightstream
from weightstream import BudgetError, offload

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn)
BAD = "blocks.2.up.lora_up.weight"


def refused(made: Any, given: Any) -> str:
    """Why it is refused."""
    assert offload.load_loras_into_model(made, [given]) == []
    ((_, reason),) = made._loras_errors
    return reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_with_a_number_that_is_none_is_refused_by_its_key(dtype: Any, value: float, tmp_path: Path) -> None:
    if dtype == torch.float8_e4m3fn and value == value:
        pytest.skip("the type has no infinity")
    made, x = model(), inputs()
    plain = run(made, x)
    good = adapter("lora", seed=3)
    path = good.write(tmp_path / "good.safetensors")
    assert offload.load_loras_into_model(made, [path]) == [path]
    adapted = run(made, x)
    tensors = {key: value.to(dtype) if "lora" in key else value for key, value in adapter("lora").tensors.items()}
    tensors[BAD][5, 1] = value
    for given in (str(write(tmp_path / "bad.safetensors", tensors)), dict(tensors)):
        reason = refused(made, given)
        assert BAD in reason and f"element 21 of it is {'NaN' if value != value else 'infinite'}" in reason, reason
        assert "blocks.1" not in reason and "blocks.3" not in reason
        # A load that gives nothing takes what there was, as every load does.
        assert same_bits(run(made, x), plain)
    offload.load_loras_into_model(made, [path])
    assert same_bits(run(made, x), adapted)
    assert offload.load_loras_into_model(made, [str(tmp_path / "bad.safetensors")], check_only=True) == []
    assert BAD in made._loras_errors[0][1] and same_bits(run(made, x), adapted)


@pytest.mark.parametrize("kind", ["lokr", "loha", "oft", "diff", "dora", "conv with a core"])
def test_every_part_of_every_kind_is_looked_at(kind: str, tmp_path: Path) -> None:
    made, given = model(), adapter(kind, blocks=[1])
    for key in given.tensors:
        tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
        tensors[key].view(-1)[-1] = float("nan")
        reason = refused(made, str(write(tmp_path / "bad.safetensors", tensors)))
        assert key in reason and "NaN" in reason, reason


def test_views_and_what_is_not_for_the_model_are_as_they_are(tmp_path: Path) -> None:
    made, given = model(), adapter("lora", blocks=[0])
    tensors: dict[str, Tensor] = dict(given.tensors)
    # A view with a step: its own numbers are finite, and those between are not.
    wide = torch.full((4, 64), float("nan"))
    wide[:, ::2] = tensors["blocks.0.up.lora_down.weight"]
    tensors["blocks.0.up.lora_down.weight"] = wide[:, ::2]
    other = "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"
    tensors[other] = torch.full((4, 8), float("nan"))
    tensors[other.replace("down", "up")] = torch.full((8, 4), float("nan"))
    assert offload.load_loras_into_model(made, [tensors]) == [tensors], made._loras_errors
    assert torch.isfinite(run(made, inputs())).all()


def test_many_bad_tensors_are_told_in_one_message() -> None:
    tensors = {key: torch.full_like(value, float("inf")) for key, value in adapter("diff").tensors.items()}
    reason = refused(model(), tensors)
    assert reason.count("infinite") == 8 and "training diverged" in reason, reason
    tensors |= {key: torch.full_like(value, float("nan")) for key, value in adapter("conv diff").tensors.items()}
    assert "and 4 more tensors" in refused(model(), tensors)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_full_checkpoint_is_told_to_be_one_in_a_sentence(prefix: str, tmp_path: Path) -> None:
    made, x = model(), inputs()
    plain = run(made, x)
    tensors = {prefix + key: value.clone() for key, value in made.state_dict().items()}
    for variations in (False, True):
        path = str(write(tmp_path / "full.safetensors", tensors))
        assert offload.load_loras_into_model(made, [path], ignore_model_variations=variations) == []
        reason = made._loras_errors[0][1]
        assert (
            reason.startswith(f"it is a full checkpoint and no adapter: {len(tensors)} tensors") and "\n" not in reason
        )
        assert len(reason) < 250 and "load_model_data" in reason, reason
    assert same_bits(run(made, x), plain)


def test_a_header_with_a_blank_alpha_is_refused_by_its_field(tmp_path: Path) -> None:
    made, given = model(), adapter("lora", blocks=[0])
    blank = {"lora_alpha": ""}
    path = given.write(tmp_path / "with.safetensors", blank)
    assert offload.load_loras_into_model(made, [path]) == [path]  # its tensors say what it is
    tensors = {key: value for key, value in given.tensors.items() if not key.endswith("alpha")}
    reason = refused(made, str(write(tmp_path / "without.safetensors", tensors, blank)))
    assert '"lora_alpha" is empty' in reason and "write a number into it" in reason, reason


def test_a_budget_error_says_how_its_sum_is_made(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    shapes = {"blocks.{}.up": (64, 32), "blocks.{}.down": (32, 64)}
    for number in range(6):
        for name, (rows, columns) in shapes.items():
            name = name.format(number)
            tensors[f"{name}.lora_down.weight"] = torch.ones(512, columns)
            tensors[f"{name}.lora_up.weight"] = torch.ones(rows, 512)
    tensors |= {"head.lora_down.weight": torch.ones(8, 32), "head.lora_up.weight": torch.ones(16, 8)}
    block = sum(value.nbytes for key, value in tensors.items() if key.startswith("blocks.0."))
    outside = sum(value.nbytes for key, value in tensors.items() if key.startswith("head"))
    made = model(blocks=6)
    for share in (0.3, 0.4, 0.5, 0.6):
        try:
            attachment = weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * share))
            break
        except BudgetError:
            continue
    with attachment:
        with pytest.raises(BudgetError) as caught:
            offload.load_loras_into_model(made, [str(write(tmp_path / "a.safetensors", tensors))])
        text = str(caught.value)
        assert f"the largest block's are {block}, of {6 * block} in all blocks" in text, text
        assert f"{outside} for those of layers in no block" in text, text
        words = text.split(" bytes of device memory")[0].split()
        ring = int(text.split("beside the model: ")[1].split()[0])
        assert int(words[-1]) == ring + outside and ring >= block


def overflowing(blocks: int, size: int) -> Tensor:
    """Blocks whose antisymmetric part is infinite."""
    whole = torch.full((blocks, size, size), 1.7e308, dtype=torch.float64)
    return whole.triu(1) - whole.tril(-1)


@pytest.mark.parametrize(
    "tensors",
    [
        {"oft_blocks": overflowing(4, 16)},
        {"oft_r": overflowing(4, 8), "oft_s": torch.ones(64, 1)},
        {"oft_R.weight": torch.full((4, 28), 1e38)},
        {"boft_R": overflowing(4, 8).expand(2, -1, -1, -1), "boft_s": torch.ones(64, 1)},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_a_rotation_that_cannot_be_computed_is_refused_and_the_others_are_loaded(tensors: Any, tmp_path: Path) -> None:
    made, x = model(), inputs()
    good = adapter("lora").write(tmp_path / "good.safetensors")
    offload.load_loras_into_model(made, good)
    wanted = run(made, x)
    bad = str(write(tmp_path / "bad.safetensors", {f"blocks.1.up.{key}": value for key, value in tensors.items()}))
    assert offload.load_loras_into_model(made, [bad, good]) == [good]
    assert made._loras_errors[0][0] == bad
    assert "blocks.1.up: its rotation cannot be computed" in made._loras_errors[0][1]
    assert same_bits(run(made, x), wanted)


def test_a_scale_that_float32_does_not_hold_is_refused_and_a_product_with_a_multiplier_overflows(
    tmp_path: Path,
) -> None:
    made, given, x = model(), adapter("lora", blocks=[0]), inputs()
    plain = run(made, x)
    huge = {key: torch.tensor(1e300, dtype=torch.float64) if "alpha" in key else v for key, v in given.tensors.items()}
    reason = refused(made, str(write(tmp_path / "a.safetensors", huge)))
    assert "too large for float32" in reason and "blocks.0.up" in reason, reason
    assert same_bits(run(made, x), plain)
    large = {key: torch.tensor(1e30) if "alpha" in key else value for key, value in given.tensors.items()}
    path = str(write(tmp_path / "b.safetensors", large))
    assert offload.load_loras_into_model(made, path, 1e30) == [path]
    assert not torch.isfinite(run(made, x)).all()  # as the sum in that type is, and no error of an operator
    offload.activate_loras(made, [0], [0.0])
    assert same_bits(run(made, x), plain)


@pytest.mark.parametrize(
    "kind", ["lora", "dora", "lokr", "lokr of factors", "loha", "diff", "glora", "conv", "conv loha"]
)
def test_factors_with_dimensions_of_one_behind_are_the_same(kind: str, tmp_path: Path) -> None:
    made, given, x = model(), adapter(kind, blocks=[1]), inputs()
    path = given.write(tmp_path / "a.safetensors")
    assert offload.load_loras_into_model(made, path) == [path]
    wanted = run(made, x)
    for key in list(given.tensors):
        behind = dict(given.tensors)
        for name in behind:
            if name.split(".")[3:] == key.split(".")[3:] and behind[name].dim() == 2:
                behind[name] = behind[name].unsqueeze(-1)
        path = str(write(tmp_path / "b.safetensors", behind))
        if offload.load_loras_into_model(made, path) == [path]:
            assert torch.allclose(run(made, x), wanted, atol=1e-6), key
        else:
            assert "blocks.1." in made._loras_errors[0][1], (key, made._loras_errors)


@pytest.mark.parametrize("kind", ["dora", "dora by column", "conv dora"])
def test_a_length_that_overflows_gives_no_numbers_and_not_zeros(kind: str, tmp_path: Path) -> None:
    made, given, x = model(), adapter(kind, blocks=[0]), inputs()
    plain = run(made, x)
    tensors = {key: value.clone() for key, value in given.tensors.items()}
    for key, value in tensors.items():
        if "lora_down" in key:
            value.view(-1)[0] = 1e38
    path = str(write(tmp_path / "a.safetensors", tensors))
    assert offload.load_loras_into_model(made, path) == [path]
    assert not torch.isfinite(run(made, x)).all()
    offload.unload_loras_from_model(made)
    assert same_bits(run(made, x), plain)


@pytest.mark.filterwarnings("error")
def test_a_complex_alpha_is_refused_and_not_read_by_half() -> None:
    given = adapter("lora", blocks=[0])
    key = "blocks.0.up.alpha"
    reason = refused(model(), {**given.tensors, key: torch.tensor(2 + 1j)})
    assert key in reason, reason
