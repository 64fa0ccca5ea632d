"""Adapter files for diffusers' own models, in the names of every trainer and of the models' authors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightstream import _native

diffusers = pytest.importorskip("diffusers")

FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
    "guidance_embeds": True,
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "image_dim": 16,
    "added_kv_proj_dim": 32,
}
MODELS = {
    "FluxTransformer2DModel": FLUX,
    "WanTransformer3DModel": WAN,
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "HunyuanVideoTransformer3DModel": {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    "SD3Transformer2DModel": {"num_layers": 1},
    "LTXVideoTransformer3DModel": {"num_layers": 1},
}
H = 32

Sizes = list[tuple[str, int, int]]


def linear_layers(name: str) -> Sizes:
    with torch.device("meta"):
        model = getattr(diffusers, name)(**MODELS[name])
    found = [(layer, module) for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [(layer, module.out_features, module.in_features) for layer, module in found]


def plan(model: Sizes, file: Sizes, prefix: str, kohya: bool) -> _native.AdapterPlan:
    layers = [(name, "linear", [rows, columns], True) for name, rows, columns in model]
    endings = ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
    tensors = []
    for name, rows, columns in file:
        spelled = prefix + (name.replace(".", "_") if kohya else name)
        tensors.append((f"{spelled}.{endings[0]}.weight", "BF16", [4, columns]))
        tensors.append((f"{spelled}.{endings[1]}.weight", "BF16", [rows, 4]))
    return _native.AdapterPlan(layers, tensors, {}, {})


def rows_of(made: _native.AdapterPlan) -> dict[str, int]:
    """Rows that are changed of each layer. Everything has to be applied."""
    assert made.refused() == [] and made.absent() == [], made.report()
    rows: dict[str, int] = {}
    for target in made.targets():
        _, first, past = target.parts["up"]
        count = -1 if first is None else past - first
        rows[target.layer] = rows.get(target.layer, 0) + count
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_names_are_known_in_every_spelling(name: str) -> None:
    model = linear_layers(name)
    flat = [("lora_unet_", True), ("lora_transformer_", True), ("lycoris_", True)]
    dotted = ["", "transformer.", "diffusion_model.", "base_model.model.", "base_model.model.transformer."]
    for prefix, kohya in [*flat, *((prefix, False) for prefix in dotted)]:
        assert rows_of(plan(model, model, prefix, kohya)) == {layer: -1 for layer, _, _ in model}


def flux_as_published() -> Sizes:
    sizes: Sizes = []
    for block in range(2):
        for stream in ("img", "txt"):
            name = f"double_blocks.{block}.{stream}"
            sizes += [(f"{name}_attn.qkv", 3 * H, H), (f"{name}_attn.proj", H, H), (f"{name}_mod.lin", 6 * H, H)]
            sizes += [(f"{name}_mlp.0", 4 * H, H), (f"{name}_mlp.2", H, 4 * H)]
        name = f"single_blocks.{block}"
        sizes += [(f"{name}.linear1", 7 * H, H), (f"{name}.linear2", H, 5 * H), (f"{name}.modulation.lin", 3 * H, H)]
    sizes += [("img_in", H, 4), ("txt_in", H, 32), ("vector_in.in_layer", H, 32), ("vector_in.out_layer", H, H)]
    for name in ("time_in", "guidance_in"):
        sizes += [(f"{name}.in_layer", H, 256), (f"{name}.out_layer", H, H)]
    return [*sizes, ("final_layer.linear", 4, H), ("final_layer.adaLN_modulation.1", 2 * H, H)]


def wan_as_published() -> Sizes:
    sizes: Sizes = []
    for block in range(2):
        name = f"blocks.{block}"
        sizes += [(f"{name}.{kind}_attn.{part}", H, H) for kind in ("self", "cross") for part in "qkvo"]
        sizes += [(f"{name}.cross_attn.k_img", H, H), (f"{name}.cross_attn.v_img", H, H)]
        sizes += [(f"{name}.ffn.0", 64, H), (f"{name}.ffn.2", H, 64)]
    return sizes


@pytest.mark.parametrize("kohya", [True, False])
def test_files_in_the_authors_names_fit_diffusers_and_the_reverse(kohya: bool) -> None:
    prefix = "lora_unet_" if kohya else "diffusion_model."
    flux, ours = flux_as_published(), linear_layers("FluxTransformer2DModel")
    rows = rows_of(plan(ours, flux, prefix, kohya))
    assert set(rows) == {name for name, _, _ in ours}
    cut = {name: count for name, count in rows.items() if count >= 0}
    sizes = {name: count for name, count, _ in ours}
    assert all(sizes[name] == count for name, count in cut.items()), "a layer gets all of its rows"
    # Two streams and two blocks of q, k and v, twice q, k, v and the feed-forward, and the halves that change places.
    assert len(cut) == 2 * 2 * 3 + 2 * 4 + 1

    back = plan(flux, ours, prefix, kohya)
    assert set(rows_of(back)) == {name for name, _, _ in flux}
    covered: dict[str, list[tuple[int, int]]] = {}
    for target in back.targets():
        if target.rows is not None:
            covered.setdefault(target.layer, []).append(target.rows)
    assert len(covered) == 2 * 2 + 2 + 1
    for layer, ranges in covered.items():
        edges = sorted(ranges)
        assert edges[0][0] == 0 and all(a[1] == b[0] for a, b in zip(edges, edges[1:])), layer
        assert edges[-1][1] == next(rows for name, rows, _ in flux if name == layer)

    wan, ours = wan_as_published(), linear_layers("WanTransformer3DModel")
    assert len(rows_of(plan(ours, wan, prefix, kohya))) == len(wan)
    mine = [layer for layer in ours if layer[0].startswith("blocks.")]
    assert len(rows_of(plan(wan, mine, prefix, kohya))) == len(wan) == len(mine)
