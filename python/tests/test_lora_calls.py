"""Loading, activating, stepping and unloading adapters: mmgp's functions, and what they leave alone."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import Adapter, Model, adapter, assert_close, inputs, merged, model, whole_differences
from safetensors.torch import save_file
from torch import nn

import weightstream
from weightstream import LoadingCancelled, ModelError, WeightsError, offload
from weightstream.adapters.state import state_of


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[str, Adapter]]:
    made = {"a": adapter("lora", 1), "b": adapter("lora", 2), "c": adapter("conv", 3), "d": adapter("dora", 4)}
    return {name: (one.write(tmp_path / f"{name}.safetensors"), one) for name, one in made.items()}


def paths(files: dict[str, tuple[str, Adapter]], names: str) -> list[str]:
    return [files[name][0] for name in names]


def expect(made: Model, files: dict[str, tuple[str, Adapter]], **multipliers: float) -> None:
    """The model computes with these adapters."""
    given = [(files[name][1], multiplier) for name, multiplier in multipliers.items()]
    x = inputs()
    assert_close(run(made, x), run(merged(made, *given), x), torch.zeros(0))


def is_plain(made: nn.Module) -> bool:
    return all("forward" not in module.__dict__ for module in made.modules())


def test_a_list_of_multipliers_has_one_for_each_step_and_keeps_its_last(files: Any) -> None:
    made = model()
    accepted = offload.load_loras_into_model(made, paths(files, "ab"), [1.0, [0.8, 0.4, 0.0]])
    assert accepted == paths(files, "ab") and made._loras_errors == []
    for step, value in ((0, 0.8), (1, 0.4), (2, 0.0), (3, 0.0), (1, 0.4), (1000, 0.0), (0, 0.8)):
        offload.set_step_no_for_lora(made, step)
        expect(made, files, a=1.0, b=value)
    offload.set_step_no_for_lora(made, 2)
    offload.activate_loras(made, ["1"], [[0.5, 0.25]])  # begins at step 0 again
    expect(made, files, b=0.5)
    offload.set_step_no_for_lora(made, 1)
    expect(made, files, b=0.25)


def test_missing_multipliers_are_one_and_a_number_is_the_firsts(files: Any) -> None:
    made = model()
    offload.load_loras_into_model(made, paths(files, "ab"))
    expect(made, files, a=1.0, b=1.0)
    offload.load_loras_into_model(made, paths(files, "ab"), [0.5])
    expect(made, files, a=0.5, b=1.0)
    offload.load_loras_into_model(made, paths(files, "a")[0], 0.25)
    expect(made, files, a=0.25)


def test_activating_replaces_what_was_active(files: Any) -> None:
    made = model()
    plain = run(made, inputs())
    offload.load_loras_into_model(made, paths(files, "abcd"), activate_all_loras=False)
    assert same_bits(run(made, inputs()), plain)
    for numbers, multipliers, wanted in (
        ([0], None, {"a": 1.0}),
        (["2", 1], [0.3, 0.6], {"b": 0.6, "c": 0.3}),
        ([3, 0], [0.5, 0.5], {"a": 0.5, "d": 0.5}),
        ("3", 2.0, {"d": 2.0}),
    ):
        offload.activate_loras(made, numbers, multipliers)
        expect(made, files, **wanted)
    offload.activate_loras(made, [])
    assert same_bits(run(made, inputs()), plain)
    for numbers in ([4], ["x"], [-1], [True], [0, 0], [0, "0"]):
        with pytest.raises(WeightsError, match="lora_nos"):
            offload.activate_loras(made, numbers)


def test_loading_replaces_and_unloading_restores_exactly(files: Any) -> None:
    made, x = model(), inputs()
    state = {name: value.clone() for name, value in made.state_dict().items()}
    identities = {name: (module, type(module)) for name, module in made.named_modules()}
    plain = run(made, x)
    for names in ("a", "bc", "d", ""):
        offload.load_loras_into_model(made, paths(files, names))
        expect(made, files, **dict.fromkeys(names, 1.0))
        assert {name: (module, type(module)) for name, module in made.named_modules()} == identities
        assert all(same_bits(value, state[name]) for name, value in made.state_dict().items())
    assert is_plain(made)
    offload.load_loras_into_model(made, paths(files, "ad"))
    offload.unload_loras_from_model(made)
    assert is_plain(made) and same_bits(run(made, x), plain) and state_of(made) is None
    offload.unload_loras_from_model(made)
    offload.set_step_no_for_lora(made, 3)
    offload.activate_loras(made, [])


def test_files_that_do_not_fit_are_named_and_the_others_numbered_without_them(files: Any, tmp_path: Path) -> None:
    made = model()
    other = Adapter({"blocks.0.nothing.lora_A.weight": torch.zeros(4, 32)}, {})
    alone = Adapter({"blocks.0.up.lora_A.weight": torch.zeros(4, 32)}, {})
    wrong = Adapter(
        {"blocks.0.up.lora_A.weight": torch.zeros(4, 32), "blocks.0.up.lora_B.weight": torch.zeros(9, 4)}, {}
    )
    bad = {
        "other": other.write(tmp_path / "other.safetensors"),
        "alone": alone.write(tmp_path / "alone.safetensors"),
        "wrong": wrong.write(tmp_path / "wrong.safetensors"),
        "missing": str(tmp_path / "missing.safetensors"),
        "torn": str(tmp_path / "torn.safetensors"),
    }
    Path(bad["torn"]).write_bytes(b"\x40\0\0\0\0\0\0\0{")
    given = [bad["other"], files["a"][0], *list(bad.values())[1:], files["b"][0]]
    multipliers = [9.0, 0.5, 9.0, 9.0, 9.0, 9.0, 0.25]
    assert offload.load_loras_into_model(made, given, multipliers) == paths(files, "ab")
    assert [path for path, _ in made._loras_errors] == [bad["other"], *list(bad.values())[1:]]
    texts = dict(made._loras_errors)
    assert "blocks_*_nothing" in texts[bad["other"]] or "nothing" in texts[bad["other"]]
    assert "blocks.0.up" in texts[bad["alone"]] and "up" in texts[bad["wrong"]]
    expect(made, files, a=0.5, b=0.25)
    offload.activate_loras(made, [1])
    expect(made, files, b=1.0)


def test_check_only_changes_nothing(files: Any, tmp_path: Path) -> None:
    made = model()
    offload.load_loras_into_model(made, paths(files, "a"), [0.5])
    before = {name: dict(module.__dict__) for name, module in made.named_modules()}
    bad = Adapter({"x.lora_A.weight": torch.zeros(4, 32)}, {}).write(tmp_path / "x.safetensors")
    assert offload.load_loras_into_model(made, [bad, *paths(files, "bc")], check_only=True) == paths(files, "bc")
    assert [path for path, _ in made._loras_errors] == [bad]
    del made._loras_errors
    for name, module in made.named_modules():
        now = {key: value for key, value in module.__dict__.items() if key != "_loras_errors"}
        assert now == {key: value for key, value in before[name].items() if key != "_loras_errors"}
    expect(made, files, a=0.5)


def test_variations_skip_what_does_not_fit_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, given = model(), adapter("lora", blocks=range(2))
    tensors = dict(given.tensors)
    tensors["blocks.2.up.lora_down.weight"] = torch.zeros(4, 99)
    tensors["blocks.2.up.lora_up.weight"] = torch.zeros(64, 4)
    tensors["blocks.9.up.lora_down.weight"] = torch.zeros(4, 32)
    tensors["blocks.9.up.lora_up.weight"] = torch.zeros(64, 4)
    path = str(tmp_path / "a.safetensors")
    save_file(tensors, path)
    assert offload.load_loras_into_model(made, path) == []
    ((_, text),) = made._loras_errors
    assert "blocks.2.up" in text
    with caplog.at_level("INFO", "weightstream.offload"):
        assert offload.load_loras_into_model(made, path, ignore_model_variations=True) == [path]
    assert "left out" in caplog.text and "blocks.2.up" in caplog.text
    x = inputs()
    assert_close(run(made, x), run(merged(made, (given, 1.0)), x), torch.zeros(0))


def test_keys_of_another_model_of_the_pipeline_are_left_out(tmp_path: Path) -> None:
    made, given = model(), adapter("lora", prefix="lora_unet_")
    tensors = {**given.tensors, "lora_te_text_model_x.lora_down.weight": torch.zeros(4, 8)}
    tensors["lora_te_text_model_x.lora_up.weight"] = torch.zeros(8, 4)
    path = str(tmp_path / "a.safetensors")
    save_file(tensors, path)
    assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
    x = inputs()
    assert_close(run(made, x), run(merged(made, (given, 1.0)), x), torch.zeros(0))


def test_preprocessing_renames_and_drops_keys(tmp_path: Path, files: Any) -> None:
    made, given = model(), adapter("lora", prefix="strange.")
    tensors = {**given.tensors, "useless.weight": torch.zeros(3)}
    path = str(tmp_path / "a.safetensors")
    save_file(tensors, path)
    x = inputs()

    def rename(sd: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key.removeprefix("strange."): value for key, value in sd.items() if key.startswith("strange.")}

    for rules in (rename, {"strange": "", "useless": None}):
        assert offload.load_loras_into_model(made, path, preprocess_sd=rules) == [path], made._loras_errors
        assert_close(run(made, x), run(merged(made, (given, 1.0)), x), torch.zeros(0))

    def broken(sd: dict[str, torch.Tensor]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        offload.load_loras_into_model(made, paths(files, "b"), preprocess_sd=broken)
    assert_close(run(made, x), run(merged(made, (given, 1.0)), x), torch.zeros(0))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 96)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn["qkv"](x)


def test_a_map_splits_and_fuses_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    split = {"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [32, 32, 32]}}
    fused = Fused().eval()
    parts = {f"attn.{key}.lora_A.weight": torch.randn(4, 32) for key in "qkv"}
    parts.update({f"attn.{key}.lora_B.weight": torch.randn(32, 4) for key in "qkv"})
    path = str(tmp_path / "a.safetensors")
    save_file(parts, path)
    assert offload.load_loras_into_model(fused, path, [0.5], split_linear_modules_map=split) == [path], (
        fused._loras_errors
    )
    x = torch.randn(3, 32)
    delta = torch.cat([parts[f"attn.{key}.lora_B.weight"] @ parts[f"attn.{key}.lora_A.weight"] for key in "qkv"])
    wanted = nn.functional.linear(x, fused.attn["qkv"].weight + 0.5 * delta, fused.attn["qkv"].bias)
    assert torch.allclose(run(fused, x), wanted, atol=1e-4)

    apart = nn.ModuleDict({"attn": nn.ModuleDict({key: nn.Linear(32, 32) for key in "qkv"})}).eval()
    whole = {"attn.qkv.lora_A.weight": torch.randn(6, 32), "attn.qkv.lora_B.weight": torch.randn(96, 6)}
    save_file(whole, path)
    assert offload.load_loras_into_model(apart, path, split_linear_modules_map=split) == [path], apart._loras_errors
    delta = whole["attn.qkv.lora_B.weight"] @ whole["attn.qkv.lora_A.weight"]
    for number, key in enumerate("qkv"):
        layer = apart.attn[key]
        wanted = nn.functional.linear(x, layer.weight + delta[32 * number : 32 * number + 32], layer.bias)
        assert torch.allclose(run(layer, x), wanted, atol=1e-4)


@pytest.mark.parametrize(
    "given", [["x"], [[]], [[0.1, "x"]], [math.nan], [[math.inf]], [True], "1", {0: 1}, [None], [1, 2, 3]]
)
def test_multipliers_that_are_none_are_refused(given: Any, files: Any) -> None:
    made = model()
    offload.load_loras_into_model(made, paths(files, "a"), [0.5])
    with pytest.raises(WeightsError, match="multi"):
        offload.load_loras_into_model(made, paths(files, "ab"), given)
    with pytest.raises(WeightsError, match="multi"):
        offload.activate_loras(made, [0], [1, 2] if given == [1, 2, 3] else given)
    expect(made, files, a=0.5)
    for step in (-1, "1", 1.5, None, True):
        with pytest.raises(WeightsError, match="step_no"):
            offload.set_step_no_for_lora(made, step)


def test_arguments_of_other_types_are_refused(files: Any) -> None:
    with pytest.raises(ModelError, match="Module"):
        offload.load_loras_into_model("model", paths(files, "a"))
    for call in (offload.activate_loras, offload.set_step_no_for_lora, offload.sync_models_loras):
        with pytest.raises(ModelError, match="Module"):
            call(3, 0)
    for bad in ({"pinnedLora": 1}, {"maxReservedLoras": -2}, {"maxReservedLoras": True}):
        with pytest.raises(TypeError):
            offload.load_loras_into_model(model(), paths(files, "a"), **bad)


def test_loading_is_watched_and_can_be_cancelled(files: Any) -> None:
    made = model()
    offload.load_loras_into_model(made, paths(files, "d"), [0.5])
    heard: list[tuple] = []
    callback = offload.LoadingCallback(progress=lambda *phase: heard.append(phase))
    with offload.loading_context(callback, model_ids={files["a"][0]: "transformer"}):
        offload.load_loras_into_model(made, paths(files, "ab"), check_only=True)
    assert heard[1:] == [
        ("Loading LoRAs", 0, 2, "transformer"),
        ("Loading LoRAs", 1, 2, "transformer"),
        ("LoRAs Loaded", 2, 2, "transformer"),
    ]
    for stop in range(1, len(heard)):
        seen: list[str] = []
        callback = offload.LoadingCallback(
            lambda seen=seen, stop=stop: len(seen) > stop, lambda *p, s=seen: s.append(p[0])
        )
        with pytest.raises(LoadingCancelled), offload.loading_context(callback):
            offload.load_loras_into_model(made, paths(files, "ab"))
        expect(made, files, d=0.5)


TRIPPED = tuple(
    f"adapters/{name}.py" for name in ("state", "settling", "placing", "streaming", "adapted", "strengths", "reading")
) + ("overrides.py", "offload/loras.py")
"""Where interrupts come."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("attach", [False, True])
def test_an_interrupt_at_any_point_leaves_the_former_ones(files: Any, attach: bool) -> None:
    made = model(blocks=2)
    two = {name: adapter("lora", seed, blocks=range(2)) for name, seed in (("a", 1), ("b", 2))}
    for name, one in two.items():
        one.write(Path(files[name][0]))
    given = {name: (files[name][0], one) for name, one in two.items()}
    attachment = weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * 0.9)) if attach else None
    offload.load_loras_into_model(made, paths(given, "a"), [0.5])
    calls = 0

    def trip(at: int) -> Any:
        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.endswith(TRIPPED):
                calls += 1
                if calls == at:
                    raise KeyboardInterrupt
            return None

        return trace

    at = 1
    while True:
        calls, done = 0, False
        sys.settrace(trip(at))
        try:
            offload.load_loras_into_model(made, paths(given, "b"), [0.25])
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if done:  # also where an interrupt got lost in a generator that was being closed
            expect(made, given, b=0.25)
            offload.load_loras_into_model(made, paths(given, "a"), [0.5])
        expect(made, given, a=0.5)
        if calls < at:
            break
        at += 1 if at < 60 else 7
    if attachment is not None:
        attachment.detach()
    offload.unload_loras_from_model(made)
    assert is_plain(made)


def test_a_wide_adapter_with_a_side_configuration(tmp_path: Path) -> None:
    made, given = model(), adapter("lora")
    tensors = {
        key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): value
        for key, value in given.tensors.items()
        if not key.endswith("alpha")
    }
    folder = tmp_path / "peft"
    folder.mkdir()
    save_file(
        {f"base_model.model.{key}": value for key, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 2}')
    x = inputs()
    for path in (str(folder), str(folder / "adapter_model.safetensors")):
        assert offload.load_loras_into_model(made, path) == [path], made._loras_errors
        assert_close(run(made, x), run(merged(made, (given, 1.0)), x), torch.zeros(0))


def test_norms_and_parameters_are_never_ignored(tmp_path: Path) -> None:
    made, given = model(), whole_differences()
    path = given.write(tmp_path / "a.safetensors")
    offload.load_loras_into_model(made, path)
    names = {name for one in state_of(made).set.loaded for name in one.pieces}
    assert names == {"blocks.0.norm", "blocks.1.up", "blocks.1.mix", "blocks.2.modulation", "embed"}
