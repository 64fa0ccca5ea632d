"""Tiny models of many transformers and diffusers classes: towers, ownership, reads and segments, bit for bit."""

from __future__ import annotations

import functools

import planning_models
import pytest
import torch
from planning_replay import check_plan, check_replay
from torch import nn
from torch.utils._pytree import tree_leaves

from weightstream.errors import ForwardError
from weightstream.ownership import collect
from weightstream.recorder import Recorder
from weightstream.segments import Reason, plan_segments, small_tensors
from weightstream.towers import find_towers

transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")

# Towers with their number of blocks, and the segments of each tower's first block.
EXPECTED: dict[str, dict[str, tuple[int, int]]] = {
    "llama": {"model.layers": (3, 7)},
    "llama_tied": {"model.layers": (3, 7)},
    "qwen2": {"model.layers": (3, 7)},
    "qwen3": {"model.layers": (3, 7)},
    "mistral": {"model.layers": (3, 7)},
    "mixtral": {"model.layers": (3, 5)},
    "gemma": {"model.layers": (3, 7)},
    "gemma2": {"model.layers": (3, 7)},
    "phi": {"model.layers": (3, 6)},
    "phi3": {"model.layers": (3, 3)},
    "gpt2": {"transformer.h": (3, 4)},
    "gpt_neox": {"gpt_neox.layers": (3, 4)},
    "gptj": {"transformer.h": (3, 4)},
    "opt": {"model.decoder.layers": (3, 4)},
    "falcon": {"transformer.h": (3, 4)},
    "bloom": {"transformer.h": (3, 4)},
    "mamba": {"backbone.layers": (3, 1)},
    "mamba2": {"backbone.layers": (3, 1)},
    "bert": {"encoder.layer": (3, 6)},
    "roberta": {"encoder.layer": (3, 6)},
    "electra": {"encoder.layer": (3, 6)},
    "mpnet": {"encoder.layer": (3, 6)},
    "deberta_v2": {"encoder.layer": (3, 8)},
    "distilbert": {"transformer.layer": (3, 6)},
    "albert": {"encoder.albert_layer_groups": (2, 6)},
    "t5": {"encoder.block": (2, 6), "decoder.block": (2, 10)},
    "umt5_encoder": {"encoder.block": (2, 7)},
    "bart": {"model.encoder.layers": (2, 4), "model.decoder.layers": (2, 6)},
    "clip": {"text_model.encoder.layers": (3, 4), "vision_model.encoder.layers": (3, 4)},
    "whisper": {"model.encoder.layers": (2, 4), "model.decoder.layers": (2, 6)},
    "wav2vec2": {"feature_extractor.conv_layers": (2, 2), "encoder.layers": (3, 4)},
    "vit": {"layers": (3, 6)},
    "siglip_vision": {"encoder.layers": (3, 4)},
    "dinov2": {"encoder.layer": (3, 6)},
    "swin": {"encoder.layers": (2, 13)},
    "convnext": {"encoder.stages": (4, 1)},
    "segformer": {"stages": (4, 6)},
    "unet": {"down_blocks": (2, 31), "up_blocks": (2, 13), "mid_block.resnets": (2, 3)},
    "controlnet": {
        "controlnet_cond_embedding.blocks": (2, 1), "down_blocks": (2, 16),
        "mid_block.attentions.0.transformer_blocks.0.ff.net": (2, 1), "mid_block.resnets": (2, 3),
    },
    "autoencoder_kl": {
        "encoder.down_blocks": (2, 3), "encoder.mid_block.resnets": (2, 2), "decoder.up_blocks": (2, 5),
        "decoder.mid_block.resnets": (2, 2),
    },
    "dit": {"transformer_blocks": (3, 1)},
    "pixart": {"transformer_blocks": (3, 1)},
    "sd3": {"transformer_blocks": (3, 11)},
    "flux": {"transformer_blocks": (2, 11), "single_transformer_blocks": (2, 3)},
    "wan": {"blocks": (3, 1)},
}  # fmt: skip

# Blocks read from outside, and why blocks that real sizes would cut stay whole at these.
STRAY = {"dit": "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1.weight"}
WHOLE = {
    "mamba": Reason.OVERLAP, "mamba2": Reason.OVERLAP, "dit": Reason.STRAY, "pixart": Reason.OWN_FORWARD,
    "wan": Reason.OWN_FORWARD, "controlnet": Reason.OWN_FORWARD, "convnext": Reason.OVERLAP,
}  # fmt: skip


def tensors_of(result) -> list[torch.Tensor]:
    """All tensors in a model's output."""
    return [leaf for leaf in tree_leaves(dict(result)) if isinstance(leaf, torch.Tensor)]


@functools.cache
def studied(name: str):
    """Ownership, trace, and the outputs without and with the recorder."""
    model, inputs = planning_models.make(name)
    ownership = collect(model, find_towers(model))
    recorder = Recorder(ownership)
    with torch.inference_mode():
        torch.manual_seed(1)
        expected = tensors_of(model(**inputs))
        torch.manual_seed(1)
        with recorder.recording():
            result = tensors_of(model(**inputs))
    return model, ownership, recorder.trace(), expected, result


def test_every_model_is_expected_and_there_are_enough():
    assert planning_models.MODELS.keys() == EXPECTED.keys() and len(EXPECTED) >= 40


@pytest.mark.parametrize("name", EXPECTED)
def test_the_recorder_changes_no_bit(name):
    *_, expected, result = studied(name)
    assert expected and len(expected) == len(result)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, expected))


@pytest.mark.parametrize("name", EXPECTED)
def test_towers_and_ownership_are_whole(name):
    model, ownership, *_ = studied(name)
    assert {tower.name: len(tower.blocks) for tower in ownership.towers} == {k: v[0] for k, v in EXPECTED[name].items()}
    registered = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()] if t.nbytes}
    assert ownership.nbytes == sum(registered.values())
    listed = [*ownership.base, *(number for block in ownership.blocks for number in block.tensors)]
    assert sorted(listed) == list(range(len(ownership.tensors)))
    for block in ownership.blocks:
        inside = {id(parameter) for parameter in block.module.parameters()}
        tensors = [ownership.tensors[number] for number in block.tensors]
        assert {id(user.tensor) for tensor in tensors for user in tensor.users} <= inside


@pytest.mark.parametrize("name", EXPECTED)
def test_every_tensor_of_a_block_is_seen_read(name):
    _, ownership, trace, *_ = studied(name)
    assert trace.complete
    missing = {n for block in ownership.blocks for n in block.tensors} - trace.seen
    assert [ownership.tensors[number].name for number in missing] == []
    strays = {ownership.tensors[read.tensor].name for read in trace.stray}
    assert strays == set() if name not in STRAY else STRAY[name] in strays


@pytest.mark.parametrize("name", EXPECTED)
def test_segments_replay(name):
    _, ownership, trace, *_ = studied(name)
    plan = plan_segments(ownership, [trace])
    small = small_tensors(ownership)
    check_plan(ownership, plan, small)
    assert check_replay(plan, trace, small) == plan.order
    coarse = plan_segments(ownership, [trace], coarse=True)
    check_plan(ownership, coarse, small)
    assert check_replay(coarse, trace, small) == coarse.order
    first = {ownership.blocks[entry.block].tower: entry for entry in reversed(plan.blocks)}
    counts = {ownership.towers[tower].name: len(entry.segments) for tower, entry in first.items()}
    assert counts == {tower: segments for tower, (_, segments) in EXPECTED[name].items()}
    reasons = {entry.reason for entry in plan.blocks} - {None}
    assert reasons - {Reason.OVERLAP} <= {WHOLE.get(name)} and (name not in WHOLE or WHOLE[name] in reasons)


@pytest.mark.parametrize("name", ["pixart", "wan", "dit", "mamba"])
def test_blocks_are_cut_where_their_odd_tensors_are_resident(name):
    _, ownership, trace, *_ = studied(name)
    odd = ("table", "norm1.emb", "A_log", "conv1d", "dt_proj", "x_proj", "scale_shift")
    resident = small_tensors(ownership) | {t.index for t in ownership.tensors if any(part in t.name for part in odd)}
    plan = plan_segments(ownership, [trace], resident)
    check_plan(ownership, plan, resident)
    check_replay(plan, trace, resident)
    assert all(len(entry.segments) > 1 for entry in plan.blocks) and plan.stray == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "whisper", "mixtral"])
def test_one_plan_fits_every_step_of_a_generation(name):
    model, inputs = planning_models.make(name)
    ownership = collect(model, find_towers(model))
    traces = []

    def recorded(forward):
        @functools.wraps(forward)
        def step(*args, **kwargs):
            recorder = Recorder(ownership)
            with recorder.recording():
                result = forward(*args, **kwargs)
            traces.append(recorder.trace())
            return result

        return step

    inputs.pop("decoder_input_ids", None)
    model.forward = recorded(model.forward)
    if model.config.is_encoder_decoder:
        # generate() calls the encoder by itself, outside the model's own forward.
        encoder = model.get_encoder()
        encoder.forward = recorded(encoder.forward)
        inputs["decoder_start_token_id"] = 0
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert len(traces) >= 4
    plan = plan_segments(ownership, traces)
    small = small_tensors(ownership)
    check_plan(ownership, plan, small)
    for trace in traces:
        check_replay(plan, trace, small)
    assert all(entry.reason is None for entry in plan.blocks)


def test_rwkv_divides_its_weights_and_is_refused():
    config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, context_length=32)
    model = transformers.RwkvForCausalLM(config).requires_grad_(False).eval()
    ownership = collect(model, find_towers(model))
    with pytest.raises(ForwardError, match=r"aten\.div_.* writes to rwkv\.blocks\.0\.attention\.output\.weight"):
        with torch.inference_mode(), Recorder(ownership).recording():
            model(input_ids=torch.arange(2, 14)[None])
    assert all("forward" not in module.__dict__ for module in model.modules() if isinstance(module, nn.Linear))
