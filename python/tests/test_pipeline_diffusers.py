"""Pipelines of diffusers with tiny random models: every profile gives the resident bits, on a device that poisons what is away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_models import device

from weightstream import StateError, offload, profile_type, runtime

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

Inputs = dict[str, Any]


def clip() -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    return transformers.CLIPTextModel(config).eval()


def t5() -> Any:
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4)
    return transformers.T5EncoderModel(config).eval()


def kl_vae(latent: int, **settings: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=latent,
        sample_size=32,
        **settings,
    ).eval()


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    vae = kl_vae(1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5)
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=clip(),
        tokenizer=None,
        text_encoder_2=t5(),
        tokenizer_2=None,
        transformer=transformer,
    )


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    return diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=t5(),
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def unet() -> Any:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    ).eval()
    return diffusers.StableDiffusionPipeline(
        vae=kl_vae(4),
        text_encoder=clip(),
        tokenizer=None,
        unet=model,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def generate(pipe: Any) -> torch.Tensor:
    """What a pipeline makes of token numbers, with guidance where it has some: the encoders are called as a prompt would."""
    ids = torch.arange(16).reshape(1, 16) % 90
    generator = torch.Generator().manual_seed(3)
    common: Inputs = {"num_inference_steps": 2, "generator": generator, "output_type": "pt"}
    with torch.no_grad():
        if isinstance(pipe, diffusers.FluxPipeline):
            pooled = pipe.text_encoder(ids).pooler_output
            embeds = pipe.text_encoder_2(ids)[0]
            return pipe(prompt_embeds=embeds, pooled_prompt_embeds=pooled, height=16, width=16, **common).images
        encoder = pipe.text_encoder
        embeds, negative = encoder(ids)[0], encoder(ids + 5)[0]
        if isinstance(pipe, diffusers.WanPipeline):
            size: Inputs = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 5.0}
            return pipe(prompt_embeds=embeds, negative_prompt_embeds=negative, **size, **common).frames
        size = {"height": 32, "width": 32, "guidance_scale": 5.0}
        return pipe(prompt_embeds=embeds, negative_prompt_embeds=negative, **size, **common).images


def made(build: Any) -> tuple[Any, torch.Tensor]:
    """A pipeline with random weights and what it generates while they are resident."""
    torch.manual_seed(1)
    pipe = build()
    pipe.set_progress_bar_config(disable=True)
    reference = build()
    reference.set_progress_bar_config(disable=True)
    for name, model in pipe.components.items():
        if isinstance(model, torch.nn.Module):
            reference.components[name].load_state_dict(copy.deepcopy(model.state_dict()))
    return pipe, generate(reference)


SETTINGS: Inputs = {
    "quantizeTransformer": False,
    "convertWeightsFloatTo": None,
    "extraModelsToQuantize": None,
    "budgets": 0.15,
}


@pytest.mark.parametrize("build", [flux, wan, unet])
def test_every_profile_generates_the_resident_bits(build: Any) -> None:
    pipe, wanted = made(build)
    for number in (5, 4, 3, 2, 1):
        fills: Inputs = {"autoPreload": {}} if number in (3, 1) else {}  # what others measured is not known
        with offload.profile(pipe, number, 0, device=device("64MiB"), **SETTINGS, **fills) as managed:
            assert torch.equal(generate(pipe), wanted), number
            main = "unet" if build is unet else "transformer"
            assert bool(fills) == (managed.models[main].attachment._runtime.offloader.preloaded() > 0)
            if number in (5, 2, 1):
                assert torch.equal(generate(pipe), wanted), "again"
            stats = managed.models[main].attachment.stats()
            assert stats["copies"] > 0
            assert runtime.execution_device(getattr(pipe, main)) == torch.device("cpu")
            assert pipe.device == torch.device("cpu")
            with pytest.raises(StateError, match="release"):
                pipe.to("cpu")
            with pytest.raises(StateError, match="release"):
                pipe.enable_model_cpu_offload()
    pipe.to("cpu")
    assert torch.equal(generate(pipe), wanted)


def test_models_found_in_a_pipeline_are_those_that_are_set_up() -> None:
    pipe, wanted = made(flux)
    pipe.vae._offload_hooks = ["encode", "decode"]
    found = offload.extract_models(pipe, "")
    assert set(found) == {"vae", "text_encoder", "text_encoder_2", "transformer"}
    company = {"transformer": ["text_encoder_2"], "text_encoder_2": ["transformer"], "vae": "*"}
    settings = {**SETTINGS, "coTenantsMap": company, "asyncTransfers": False}
    with offload.all(found, device=device("64MiB"), verboseLevel=0, **settings) as managed:
        for _ in range(2):
            assert torch.equal(generate(pipe), wanted)
        assert managed.loaded() == ["vae", "text_encoder_2", "transformer"] or set(managed.loaded()) == {
            "vae",
            "transformer",
        }
        image = torch.rand(1, 3, 16, 16)
        with torch.no_grad():
            latents = pipe.vae.encode(image).latent_dist.mean
    with torch.no_grad():
        assert torch.equal(latents, pipe.vae.encode(image).latent_dist.mean)


def test_a_text_encoder_beside_a_guided_transformer_keeps_its_place() -> None:
    pipe, wanted = made(wan)
    everyone = {name: [*("transformer", "text_encoder", "vae")] for name in ("transformer", "text_encoder", "vae")}
    with offload.profile(
        pipe, profile_type.LowRAM_LowVRAM, 0, device=device("64MiB"), coTenantsMap=everyone, **SETTINGS
    ) as managed:
        for _ in range(3):
            assert torch.equal(generate(pipe), wanted)
        for name in everyone:
            assert managed.models[name].attachment.stats()["arrivals"] == 1
