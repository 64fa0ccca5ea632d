"""Loads the components of a pipeline in steps that startup timings tell apart.

    from weightstream.loaders import PipelineComponentLoader

    loader = PipelineComponentLoader("Wan2.1-T2V-1.3B-Diffusers", device="cuda")
    with startup.collect_startup_timings() as timings:
        with startup.phase("pipeline.create"):
            pipeline = loader.load_pipeline()       # component.vae, component.transformer, … with their parts

A folder as diffusers saves it, in it components of diffusers and transformers. Each step does what its phase says, so that two
ways to load can be compared step by step; the bits are those of `from_pretrained`.
"""

from __future__ import annotations

from .components import PipelineComponentLoader
from .text_encoder import TextEncoderLoader
from .transformer import TransformerLoader
from .vae import VAELoader

__all__ = ["PipelineComponentLoader", "TextEncoderLoader", "TransformerLoader", "VAELoader"]
