"""A Wan pipeline of random weights, some 2 MB, in the folders and files of a real one: for the examples' `--tiny`.

python tiny_wan.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SEED = 1024
WORDS = "<pad> </s> <unk> a cat walks on the grass realistic style , .".split()
"""The tokenizer's words; all others are unknown to it."""
WIDTH = 32
"""Of what the text encoder gives to the transformer."""


def make(folder: Path) -> None:
    """Writes the pipeline."""
    import torch
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(SEED)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    config = UMT5Config(
        vocab_size=len(WORDS), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=1
    )
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=WIDTH,
        freq_dim=64,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(config).eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer.eval(),
    )
    pipeline.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
    sys.exit(0)
