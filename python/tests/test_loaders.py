"""Loaders of components: their phases by name and order, and the bits of `from_pretrained`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from startup_reports import by_name, parents
from torch import nn

from weightstream import ConfigError, ModelError, WeightsError, startup

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from weightstream.loaders import (  # noqa: E402
    PipelineComponentLoader,
    TextEncoderLoader,
    TransformerLoader,
    VAELoader,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "benchmark"

VAE = ["vae.construct", "vae.device_transfer", "vae.checkpoint_read", "vae.weight_assignment", "vae.finalize"]
TRANSFORMER = [f"transformer.{part}" for part in ("construct", "shard_setup", "hydrate", "finalize", "compile_setup")]
ENCODER = [f"text_encoder.{part}" for part in ("construct", "hydrate", "device_transfer", "offload_setup")]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline, made by the examples' own maker."""
    folder = tmp_path_factory.mktemp("wan")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import tiny_wan
    finally:
        sys.path.remove(str(EXAMPLES))
    tiny_wan.make(folder)
    return folder


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


def children(report: dict[str, Any], name: str) -> list[str]:
    """The names of what lies directly in the phase of that name, in order."""
    number = by_name(report)[name]["id"]
    return [phase["name"] for phase in report["phases"] if phase["parent_id"] == number]


def collected(work: Any) -> tuple[Any, dict[str, Any]]:
    """What `work` gives, and the report less the phases of `offload`, which come more than once."""
    with startup.collect_startup_timings(environment=False) as timings:
        result = work()
    report = timings.to_dict()
    report["phases"] = [phase for phase in report["phases"] if not phase["name"].startswith("offload.")]
    return result, report


def test_every_component_has_its_phases_in_order_and_the_bits_of_from_pretrained(wan: Path) -> None:
    loader = PipelineComponentLoader(wan)
    pipeline, report = collected(loader.load_pipeline)
    tops = [phase["name"] for phase in report["phases"] if phase["parent_id"] is None]
    assert sorted(tops) == [
        f"component.{name}" for name in ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    ]
    assert children(report, "component.vae") == VAE
    assert children(report, "component.transformer") == TRANSFORMER
    assert children(report, "component.text_encoder") == ENCODER
    assert children(report, "component.scheduler") == children(report, "component.tokenizer") == []
    assert {phase["status"] for phase in report["phases"]} == {"success"}
    theirs = diffusers.WanPipeline.from_pretrained(wan, local_files_only=True)
    for name in ("vae", "transformer", "text_encoder"):
        assert same(getattr(pipeline, name), getattr(theirs, name)), name
        assert not getattr(pipeline, name).training
    outputs = []
    for one in (pipeline, theirs):
        one.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(5)
        outputs.append(
            one(
                "a cat", num_frames=5, height=32, width=32, num_inference_steps=2, generator=generator, output_type="pt"
            )
        )
    assert torch.equal(outputs[0].frames, outputs[1].frames)
    settings = loader.settings(pipeline.components)
    assert settings["device"] == "cpu"
    for what in ("fsdp", "cpu_offload", "streamed", "compiled"):
        assert settings[what] == {"text_encoder": False, "transformer": False, "vae": False}


def test_image_encoders_have_the_phases_of_encoders_and_constructors_none(wan: Path, tmp_path: Path) -> None:
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "image_encoder")
    index = {
        "_class_name": "WanPipeline",
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "special": ["diffusers", "AutoencoderKLWan"],
        "absent": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    made = object()
    loader = PipelineComponentLoader(tmp_path, constructors={"special": lambda folder: (made, folder)})
    modules, report = collected(loader.load_modules)
    assert list(modules) == ["image_encoder", "special"]
    assert modules["special"] == (made, str(tmp_path / "special"))
    assert children(report, "component.image_encoder") == ENCODER
    assert children(report, "component.special") == []
    theirs = transformers.CLIPVisionModel.from_pretrained(tmp_path / "image_encoder")
    assert same(modules["image_encoder"], theirs)


def test_an_encoder_that_its_library_loads_has_one_phase(wan: Path) -> None:
    encoder, report = collected(lambda: TextEncoderLoader(pretrained=True).load(wan / "text_encoder"))
    assert [phase["name"] for phase in report["phases"]] == ["text_encoder.pretrained"]
    assert same(encoder, TextEncoderLoader().load(wan / "text_encoder"))
    converted = TextEncoderLoader(dtype=torch.bfloat16).load(wan / "text_encoder")
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}


def test_an_encoder_with_a_budget_streams(wan: Path) -> None:
    resident = TextEncoderLoader().load(wan / "text_encoder")
    words = torch.tensor([[3, 4, 5, 1]])
    with torch.inference_mode():
        expected = resident(words).last_hidden_state
    encoder, report = collected(lambda: TextEncoderLoader(budget="64MiB").load(wan / "text_encoder"))
    assert parents(report)["attach"] == "text_encoder.offload_setup"
    with torch.inference_mode():
        assert torch.equal(encoder(words).last_hidden_state, expected)
    encoder._weightstream.detach()


def test_a_transformer_sharded_over_one_process_computes_the_same(wan: Path) -> None:
    folder = wan / "transformer"
    with pytest.raises(ModelError, match="needs a process group"):
        TransformerLoader(fsdp=True).load(folder)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        (sharded, report) = collected(lambda: TransformerLoader(fsdp=True).load(folder))
        assert [phase["name"] for phase in report["phases"]] == TRANSFORMER
        plain = TransformerLoader().load(folder)
        assert PipelineComponentLoader(wan).settings({"a": sharded, "b": plain})["fsdp"] == {"a": True, "b": False}
        inputs = {
            "hidden_states": torch.randn(1, 16, 1, 4, 4),
            "timestep": torch.tensor([5]),
            "encoder_hidden_states": torch.randn(1, 3, 32),
            "return_dict": False,
        }
        with torch.no_grad():
            assert torch.equal(sharded(**inputs)[0], plain(**inputs)[0])
    finally:
        torch.distributed.destroy_process_group()


def test_compiling_is_registered_and_not_done(wan: Path) -> None:
    model = TransformerLoader(compile=True).load(wan / "transformer")
    settings = PipelineComponentLoader(wan).settings({"transformer": model})
    assert settings["compiled"] == {"transformer": True}


def test_a_vae_in_two_steps(wan: Path, tmp_path: Path) -> None:
    folder = wan / "vae"
    loader = VAELoader()
    config = json.loads((folder / "config.json").read_text())
    before = torch.get_default_dtype()
    whole = loader.load(folder)
    assert torch.get_default_dtype() is before
    model, report = collected(lambda: loader.build_model(diffusers.AutoencoderKLWan, config))
    assert [phase["name"] for phase in report["phases"]] == VAE[:2]
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    # Weights under other names, and one too many.
    weights = {f"first_stage.{name}": tensor for name, tensor in load_file(next(folder.glob("*.safetensors"))).items()}
    save_file({**weights, "first_stage.ema": torch.zeros(2)}, tmp_path / "vae.safetensors")
    with pytest.raises(WeightsError, match="does not use, 1 weights .*: ema"):
        loader.load_weights(model, tmp_path / "vae.safetensors", remap={"first_stage": ""})
    seen = []
    _, report = collected(
        lambda: loader.load_weights(
            model,
            tmp_path / "vae.safetensors",
            strict=False,
            remap={"first_stage": ""},
            overlay=seen.append,
            memory_format=torch.preserve_format,
        )
    )
    assert [phase["name"] for phase in report["phases"]] == VAE[2:] and seen == [model]
    assert by_name(report)["vae.checkpoint_read"]["counters"]["tensors"] == len(weights) + 1
    assert same(model, whole)
    # Copied into the same memory, not attached to the file.
    assert objects == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert pointers == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_files_that_do_not_fit_are_errors_in_their_phase(wan: Path, tmp_path: Path) -> None:
    folder = wan / "vae"
    weights = load_file(next(folder.glob("*.safetensors")))
    name = next(iter(weights))
    for broken, said in [
        ({key: value for key, value in weights.items() if key != name}, "lacks 1 weights"),
        ({**weights, name: torch.zeros(weights[name].shape + (2,))}, "in other shapes"),
    ]:
        save_file(broken, tmp_path / "vae.safetensors")
        model = VAELoader().load(folder)
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        with startup.collect_startup_timings(environment=False) as timings:
            with pytest.raises(WeightsError, match=said):
                VAELoader().load_weights(model, tmp_path / "vae.safetensors", strict=False)
        endings = {phase["name"]: phase["error_type"] for phase in timings.to_dict()["phases"]}
        assert endings["vae.weight_assignment"] == "WeightsError" and endings["vae.checkpoint_read"] is None
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        other = tmp_path / "transformer"
        other.mkdir()
        (other / "config.json").write_text((wan / "transformer" / "config.json").read_text())
        save_file({"a": torch.zeros(1)}, other / "diffusion_pytorch_model.safetensors")
        with pytest.raises(WeightsError, match="does not fit"):
            TransformerLoader(fsdp=True).load(other)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"vae": ["os", "system"]}, "only classes of diffusers and transformers"),
        ({"vae": ["diffusers", "_private"]}, "only classes of"),
        ({"vae": ["diffusers", 5]}, "only classes of"),
        ({"vae": ["diffusers", "NoSuchModel"]}, "has no such class"),
        ({"vae": ["diffusers", "__version__"]}, "only classes of"),
        ({"../vae": ["diffusers", "AutoencoderKL"]}, "leaves its folder"),
        ({}, "has no component 'vae'"),
    ],
)
def test_an_index_of_strangers_loads_nothing_else(index: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    loader = PipelineComponentLoader(tmp_path)
    with pytest.raises(ConfigError, match=said):
        loader.load_module(next(iter(index), "vae"))
    with pytest.raises(ConfigError):
        PipelineComponentLoader(tmp_path).load_pipeline()
