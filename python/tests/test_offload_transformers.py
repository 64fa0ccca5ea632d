"""fast_load_transformers_model: models of transformers and diffusers built from one file and its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_files import Small, encoded, same, small, weights, write
from torch import nn

from weightstream import CheckpointError, ConfigError, LoadingCancelled, NotAvailableError, WeightsError, offload

transformers = pytest.importorskip("transformers")

PHASES = [
    ("Preparing Models", 0, 1, ""),
    ("Reading Configuration", 0, 2, ""),
    ("Building", 1, 2, ""),
    ("Reading Weights", 0, 3, ""),
    ("Preparing Weights", 1, 3, ""),
    ("Applying Weights", 2, 3, ""),
    ("Weights Loaded", 3, 3, ""),
]


def llama(tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def fits(model: nn.Module, expected: nn.Module) -> bool:
    state = model.state_dict()
    return all(same(state[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_one_file_and_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model = llama(tied)
    offload.save_model(model, tmp_path / "any name.safetensors")
    heard: list[tuple] = []
    with offload.loading_context(offload.LoadingCallback(progress=lambda *phase: heard.append(phase))):
        loaded = offload.fast_load_transformers_model(tmp_path / "any name.safetensors", default_dtype=None)
    assert heard == PHASES
    assert type(loaded) is type(model) and not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert fits(loaded, model)
    index = torch.arange(12).view(1, 12)
    with torch.inference_mode():
        assert same(loaded(index).logits, model(index).logits)
        assert same(loaded.generate(index, max_new_tokens=4, do_sample=False, pad_token_id=0),
                    model.generate(index, max_new_tokens=4, do_sample=False, pad_token_id=0))  # fmt: skip
    assert offload.fast_load_transformers_model(tmp_path / "any name.safetensors").dtype == torch.bfloat16


def test_what_transformers_wrote_loads_with_its_config_beside(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for given in (tmp_path, tmp_path / "model.safetensors.index.json", next(tmp_path.glob("*-of-*.safetensors"))):
        loaded = offload.fast_load_transformers_model(given, default_dtype=None)
        assert fits(loaded, model)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert same(loaded.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


def test_the_order_of_configurations(tmp_path: Path) -> None:
    model = llama()
    base = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}

    def named(name: str, folder: Path = tmp_path) -> Path:
        path = folder / name
        path.write_text(json.dumps(base | {"who": name}))
        return path

    bare = write(tmp_path / "bare.safetensors", {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    load = offload.fast_load_transformers_model
    with pytest.raises(ConfigError, match="no configuration for .*bare.safetensors"):
        load(bare)
    named("config.json")
    assert load(bare).config.who == "config.json"
    assert load(bare, defaultConfigPath=named("default.json")).config.who == "default.json"
    forced = named("forced.json")
    assert load(bare, defaultConfigPath=tmp_path / "default.json", forcedConfigPath=forced).config.who == "forced.json"
    offload.save_model(model, tmp_path / "full.safetensors", config_file_path=named("inside.json"))
    assert load(tmp_path / "full.safetensors", forcedConfigPath=forced).config.who == "inside.json"
    assert load(bare, configKwargs={"who": "kwargs"}).config.who == "kwargs"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not JSON"):
        load(bare)


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", weights(small()), {"config_base64": encoded({"_class_name": "Small"})})
    model = offload.fast_load_transformers_model(path, modelClass=Small, default_dtype=None)
    assert type(model) is Small and fits(model, small()) and model._config == {"_class_name": "Small"}
    with pytest.raises(ConfigError, match=r"Small cannot be built from .*: TypeError"):
        offload.fast_load_transformers_model(path, modelClass=Small, configKwargs={"size": 3})
    llamas = tmp_path / "llama.safetensors"
    offload.save_model(llama(), llamas)
    inner = offload.fast_load_transformers_model(llamas, modelClass=transformers.LlamaModel, default_dtype=None)
    assert same(inner.norm.weight, llama().model.norm.weight)


def test_a_model_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2).eval()
    offload.save_model(model, tmp_path / "vae.safetensors")
    loaded = offload.fast_load_transformers_model(tmp_path / "vae.safetensors", default_dtype=None)
    assert type(loaded) is diffusers.AutoencoderKL and fits(loaded, model)
    x = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        assert same(loaded.encode(x).latent_dist.mean, model.encode(x).latent_dist.mean)


def test_configurations_that_name_no_model(tmp_path: Path) -> None:
    def load(config: dict[str, Any]) -> None:
        path = write(tmp_path / "x.safetensors", weights(small()), {"config_base64": encoded(config)})
        offload.fast_load_transformers_model(path)

    for config, text in (
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel, and transformers"),
        ({"architectures": ["pipeline"]}, "has no such model"),
        ({"architectures": ["AutoModel"]}, "has no such model"),
        ({"hidden_size": 3}, "names no class"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(config)


def test_old_t5_names_mean_the_encoder(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config).eval()
    named = config.to_dict() | {"architectures": ["T5WithLMHeadModel"]}
    (tmp_path / "t5.json").write_text(json.dumps(named))
    offload.save_model(model, tmp_path / "t5.safetensors", config_file_path=tmp_path / "t5.json")
    loaded = offload.fast_load_transformers_model(tmp_path / "t5.safetensors", default_dtype=None)
    assert type(loaded) is transformers.T5EncoderModel and fits(loaded, model)


def test_names_in_the_hubs_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / "abc"
    llama().save_pretrained(snapshot, max_shard_size="4KB")
    for number, file in enumerate(list(snapshot.iterdir())):
        file.rename(repository / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    loaded = offload.fast_load_transformers_model(
        "someone/model/model.safetensors.index.json", default_dtype=None, forcedConfigPath=snapshot
    )
    assert fits(loaded, llama())
    with pytest.raises(CheckpointError, match="does not exist, here or in the local cache"):
        offload.load_sd("someone/model/other.safetensors")


def test_refusals_and_aborts_while_building(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    offload.save_model(llama(), path)
    with pytest.raises(NotAvailableError):
        offload.fast_load_transformers_model(path, do_quantize=True, quantizationType="int8")
    extra = write(tmp_path / "extra.safetensors", {"zz": torch.zeros(1)})
    with pytest.raises(WeightsError, match="does not use: zz"):
        offload.fast_load_transformers_model([path, extra])
    offload.fast_load_transformers_model([path, extra], ignore_unused_weights=True)
    phases: list[str] = []
    callback = offload.LoadingCallback(lambda: phases[-1:] == ["Building"], lambda phase, *_: phases.append(phase))
    with pytest.raises(LoadingCancelled), offload.loading_context(callback):
        offload.fast_load_transformers_model(path)
    assert phases == [phase for phase, *_ in PHASES[:3]]
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    assert not hooks, "building must leave no hook behind"
