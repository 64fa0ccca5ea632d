"""Makes the files beside it: adapters as LyCORIS (4.1.3) and PEFT (0.21.2) write them, with the weights that these merge.

Run with both installed: `python make.py`. Each file holds the adapter's own keys, `base::LAYER.weight` and `.bias`, and
`merged::LAYER.weight::M` (or `.bias`) for a multiplier M; the metadata has `layers` (name, kind, shape, bias) and, of PEFT's,
`config`. The text after `::M` of a file is the multiplier.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile

import torch
from torch import nn
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
KINDS = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d", nn.LayerNorm: "norm"}


class Small(nn.Module):
    """Every kind of layer that adapters are made for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(12, 16)
        self.square = nn.Linear(8, 8, bias=False)
        self.conv1 = nn.Conv1d(4, 6, 3)
        self.conv2 = nn.Conv2d(4, 8, (3, 2))
        self.conv3 = nn.Conv3d(2, 6, 2)
        self.same = nn.Conv2d(4, 4, 3)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.square(x)


def randomize(module: nn.Module, scale: float = 0.3) -> None:
    for name, value in list(module.named_parameters()) + list(module.named_buffers()):
        if value.is_floating_point() and not name.endswith("alpha") and name != "scalar" and "dtype_tensor" not in name:
            noise = torch.randn_like(value) * scale
            positive = "dora_scale" in name or "magnitude" in name or "rescale" in name
            with torch.no_grad():
                value.copy_(noise.abs() + 0.5 if positive else noise)


def layers_of(model: nn.Module) -> list:
    found = [(n, m) for n, m in model.named_modules() if type(m) in KINDS]
    return [[n, KINDS[type(m)], list(m.weight.shape), getattr(m, "bias", None) is not None] for n, m in found]


def write(name: str, model: nn.Module, adapter: dict, merged: dict, metadata: dict) -> None:
    tensors = {key: value.detach().clone().contiguous() for key, value in adapter.items()}
    for layer, module in model.named_modules():
        if type(module) in KINDS and any(key.startswith(f"{layer}.") for key in merged):
            tensors[f"base::{layer}.weight"] = module.weight.detach().clone()
            if getattr(module, "bias", None) is not None:
                tensors[f"base::{layer}.bias"] = module.bias.detach().clone()
    tensors |= {f"merged::{key}": value.detach().clone().contiguous() for key, value in merged.items()}
    tensors = {k: v.double() if k.startswith(("base", "merged")) else v for k, v in tensors.items()}
    save_file(tensors, HERE / f"{name}.safetensors", {"layers": json.dumps(layers_of(model)), **metadata})


def decomposed(base, delta, magnitude, axis: int, m: float):
    """A magnitude at multiplier m, by its formula: (g0 + m (g - g0)) (W + m D) / |W + m D|."""
    dims = tuple(d for d in range(base.dim()) if d != axis)
    total = base + m * delta
    old, new = ((w * w).sum(dims, keepdim=True).sqrt() for w in (base, total))
    shape = [1] * base.dim()
    shape[axis] = -1
    return (old + m * (magnitude.reshape(shape) - old)) * total / new


def lycoris(
    name: str, layer: str, kind, *, rank: int = 3, alpha: float = 2.0, multipliers=(1.0, 0.5), **options
) -> None:
    torch.manual_seed(len(name))
    model = Small()
    randomize(model)
    org = model.get_submodule(layer)
    module = kind("x", org, 1.0, lora_dim=rank, alpha=alpha, **options)
    randomize(module)
    if hasattr(module, "is_diff"):
        module.is_diff = False  # its weight is the whole one, from which it takes the difference
    if kind.name not in ("diag-oft", "boft"):  # their rotations are inverted in float32
        org.double()
        module.double()
    state = {f"lycoris_{layer}.{key}": value.float() for key, value in module.state_dict().items()}
    if hasattr(module, "get_weight"):  # of LoHa and LoKr the forward applies the scale once, the merge twice
        module.get_diff_weight = lambda multiplier=1, shape=None, device=None: (
            module.get_weight(shape) * multiplier,
            None,
        )
    merged = {}
    for m in multipliers:
        weight, bias = module.get_merged_weight(m, shape=org.weight.shape if org.weight.dim() > 1 else None)
        merged[f"{layer}.weight::{m}"] = weight.reshape(org.weight.shape)
        if bias is not None:
            merged[f"{layer}.bias::{m}"] = bias
    if getattr(module, "wd", False):
        delta = module.get_diff_weight(1.0, shape=org.weight.shape)[0].reshape(org.weight.shape)
        axis = 0 if module.wd_on_out else 1
        for m in (0.0, 0.5, 1.5):
            merged[f"{layer}.weight::{m}"] = decomposed(org.weight, delta, module.dora_scale, axis, m)
    write(name, model.double(), state, merged, {})


def peft(name: str, config, *, bias: bool = False) -> None:
    from peft import get_peft_model

    torch.manual_seed(len(name))
    model = Small().double()
    randomize(model)
    base = Small().double()
    base.load_state_dict(model.state_dict())
    wrapped = get_peft_model(model, config).double()
    for key, value in wrapped.named_parameters():
        if any(word in key for word in ("lora_", "hada_", "lokr_")):
            noise = torch.randn_like(value) * 0.3
            with torch.no_grad():
                value.copy_(noise.abs() + 0.5 if "magnitude" in key else noise)
    folder = tempfile.mkdtemp()
    wrapped.save_pretrained(folder)
    adapter = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
    text = (pathlib.Path(folder) / "adapter_config.json").read_text()
    shutil.rmtree(folder)
    done = wrapped.merge_and_unload()
    merged = {}
    for layer, module in done.named_modules():
        if type(module) in KINDS and not torch.equal(module.weight, base.get_submodule(layer).weight):
            merged[f"{layer}.weight::1.0"] = module.weight
            if bias and module.bias is not None:
                merged[f"{layer}.bias::1.0"] = module.bias
    write(name, base, adapter, merged, {"config": text})


def main() -> None:
    from lycoris.modules.boft import ButterflyOFTModule
    from lycoris.modules.diag_oft import DiagOFTModule
    from lycoris.modules.full import FullModule
    from lycoris.modules.locon import LoConModule
    from lycoris.modules.loha import LohaModule
    from lycoris.modules.lokr import LokrModule
    from lycoris.modules.norms import NormModule
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    for layer in ("lin", "conv1", "conv2", "conv3"):
        lycoris(f"lora_{layer}", layer, LoConModule)
        lycoris(f"loha_{layer}", layer, LohaModule)
        lycoris(f"lokr_{layer}", layer, LokrModule, rank=1)
        lycoris(f"diff_{layer}", layer, FullModule)
        lycoris(f"oft_{layer}", layer, DiagOFTModule, rank=2)
    for layer in ("conv1", "conv2", "conv3"):
        lycoris(f"lora_core_{layer}", layer, LoConModule, use_tucker=True)
        lycoris(f"loha_core_{layer}", layer, LohaModule, use_tucker=True)
    lycoris("lokr_core_conv2", "conv2", LokrModule, rank=1, use_tucker=True)
    lycoris("lokr_full", "lin", LokrModule, alpha=1e10, full_matrix=True)
    lycoris("lokr_full_conv2", "conv2", LokrModule, full_matrix=True)
    lycoris("lokr_both", "lin", LokrModule, rank=1, decompose_both=True, factor=4)
    for on_out in (True, False):
        axis = "rows" if on_out else "columns"
        for layer in ("lin", "square", "same", "conv3"):
            lycoris(
                f"dora_{axis}_{layer}", layer, LoConModule, multipliers=(1.0,), weight_decompose=True, wd_on_out=on_out
            )
        lycoris(f"dora_{axis}_loha", "lin", LohaModule, multipliers=(1.0,), weight_decompose=True, wd_on_out=on_out)
        lycoris(
            f"dora_{axis}_lokr", "lin", LokrModule, rank=1, multipliers=(1.0,), weight_decompose=True, wd_on_out=on_out
        )
    lycoris("oft_bound", "lin", DiagOFTModule, rank=4, constraint=0.02)
    lycoris("oft_rescale", "lin", DiagOFTModule, rank=4, multipliers=(1.0,), rescaled=True)
    lycoris("boft_lin", "lin", ButterflyOFTModule, rank=4)
    lycoris("boft_two", "lin", ButterflyOFTModule, rank=2, constraint=0.05)
    lycoris("boft_conv2", "conv2", ButterflyOFTModule, rank=4)
    lycoris("norm", "norm", NormModule)

    every = ["lin", "square", "conv2", "same"]
    peft("peft_lora", LoraConfig(r=4, lora_alpha=6, target_modules=every))
    peft("peft_rslora", LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["lin", "square"]))
    patterns = dict(rank_pattern={"square": 2}, alpha_pattern={"lin": 3})
    peft("peft_patterns", LoraConfig(r=4, lora_alpha=6, target_modules=["lin", "square"], **patterns))
    peft("peft_bias", LoraConfig(r=4, lora_alpha=6, lora_bias=True, target_modules=["lin"]), bias=True)
    peft("peft_dora", LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=every))
    peft("peft_loha", LoHaConfig(r=3, alpha=5, target_modules=every))
    peft("peft_loha_core", LoHaConfig(r=3, alpha=5, use_effective_conv2d=True, target_modules=["same"]))
    peft("peft_lokr", LoKrConfig(r=1, alpha=5, target_modules=every))
    peft("peft_lokr_full", LoKrConfig(r=8, alpha=2, target_modules=["lin", "square"]))
    peft("peft_lokr_both", LoKrConfig(r=1, alpha=5, decompose_both=True, decompose_factor=4, target_modules=["lin"]))


if __name__ == "__main__":
    main()
