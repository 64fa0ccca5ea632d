"""What a GGUF file says of a language model, in numbers that are none or that no file of its size could have: typed errors, soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_quant_gguf import gguf_file
from torch import nn

from weightstream import ConfigError, QuantizationError, WeightsError, offload
from weightstream.offload.gguf_config import gguf_config
from weightstream.offload.gguf_names import transformers_names

SHAPES = {"token_embd.weight": [32, 64], "blk.0.attn_q.weight": [64, 64], "blk.0.ffn_up.weight": [96, 64]}
GOOD = {
    "general.architecture": "llama",
    "llama.embedding_length": "64",
    "llama.block_count": "1",
    "llama.feed_forward_length": "96",
    "llama.attention.head_count": "4",
    "llama.attention.head_count_kv": "2",
    "llama.attention.key_length": "16",
    "llama.attention.layer_norm_rms_epsilon": "0.00001",
    "llama.context_length": "2048",
    "llama.rope.freq_base": "10000",
    "tokenizer.ggml.bos_token_id": "1",
}
TEXTS = ["²", "٣", "-1", "0", "1e3", " 7", "9" * 5000, "nan", "inf", "-inf", str(2**62), "[1, 2]", "", "None", "0x10"]


def test_a_configuration_holds_numbers_that_the_tensors_could_have_or_is_refused() -> None:
    assert gguf_config(GOOD, SHAPES, "x")["num_hidden_layers"] == 1
    chance = random.Random(0)
    made = refused = 0
    for _ in range(3000):
        said = {key: chance.choice(TEXTS) if chance.random() < 0.15 else text for key, text in GOOD.items()}
        said["general.architecture"] = "llama"
        try:
            config = gguf_config(said, SHAPES, "x")
        except ConfigError as error:
            assert len(str(error)) < 300
            refused += 1
            continue
        made += 1
        assert 1 <= config["num_hidden_layers"] <= len(SHAPES)
        for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            assert 1 <= config[field] <= 96, field
        numbers = [value for value in config.values() if isinstance(value, (int, float))]
        assert all(0 <= number < 2**63 for number in numbers)
    assert made and refused


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("block_count", "1000000000", "block_count is 1000000000, and the file has 3 tensors"),
        ("attention.key_length", "100000000000", "key_length is 100000000000, and the file has 96 as the largest"),
        ("attention.head_count", "0", "head_count is 0"),
        ("embedding_length", "²", "embedding_length is '²', where a number is due"),
        ("rope.freq_base", "nan", "freq_base is 'nan', where a number is due"),
    ],
)
def test_each_is_named(key: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gguf_config({**GOOD, f"llama.{key}": text}, SHAPES, "x")


@pytest.mark.parametrize("shape", [[], [32], [2, 16, 64]])
def test_embeddings_that_are_no_matrix_are_no_language_model(shape: list[int]) -> None:
    assert gguf_config(GOOD, {**SHAPES, "token_embd.weight": shape}, "x") is None


@pytest.mark.parametrize("heads", ["²", "٣", "9" * 5000, "0", "-4", "3", ""])
@pytest.mark.parametrize("rows", [(64, 64), (0, 64), ()])
def test_heads_that_are_none_are_refused(heads: str, rows: tuple[int, ...]) -> None:
    said = {"general.architecture": "llama", "llama.attention.head_count": heads}
    with pytest.raises(QuantizationError, match="no pairs of"):
        transformers_names({"blk.0.attn_q.weight": torch.zeros(rows)}, said, {})


def test_two_names_of_one_weight_are_refused() -> None:
    entries = {"blk.0.ffn_up.weight": torch.zeros(1), "model.layers.0.mlp.up_proj.weight": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"would be named model\.layers\.0\.mlp\.up_proj\.weight.*so is another"):
        transformers_names(entries, {"general.architecture": "llama"}, {})


def test_a_file_of_a_billion_layers_builds_none(tmp_path: Path) -> None:
    tensors = {name: (torch.zeros(shape).numpy(), None) for name, shape in SHAPES.items()}
    values = {key: int(text) for key, text in GOOD.items() if text.isdigit()}
    path = gguf_file(tmp_path / "x.gguf", tensors, {**values, "llama.block_count": 10**9}, "llama")
    with pytest.raises(ConfigError, match="block_count is 1000000000"):
        offload.fast_load_transformers_model(path)
    # Heads do not fit the rows that are there: nothing is put into the model.
    path = gguf_file(tmp_path / "y.gguf", tensors, {**values, "llama.attention.head_count": 2**31}, "llama")
    model = nn.ModuleDict({"model": nn.Linear(1, 1)})
    with pytest.raises(QuantizationError, match=f"no pairs of {2**31} heads"):
        offload.load_model_data(model, path)
