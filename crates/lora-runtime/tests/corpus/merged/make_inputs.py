"""Makes the files beside it whose names begin with `inputs_`: what changes inputs, embeddings and factors, as PEFT and LyCORIS (4.1.3)
write and merge them. `make.py` says what such a file holds.

Run with PEFT 0.21.2 and LyCORIS installed: `python make_inputs.py`; then `python make_inputs.py old` with PEFT 0.12.0 and again with
0.15, whose rotations are others under like names.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import shutil
import sys
import tempfile

import torch
from make import KINDS, write
from safetensors.torch import load_file
from torch import nn

KINDS[nn.Embedding] = "embedding"


class Small(nn.Module):
    """A layer of every kind that these are for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 12)
        self.square = nn.Linear(8, 8, bias=False)
        self.point = nn.Conv2d(8, 6, 1)
        self.conv = nn.Conv2d(4, 6, 3)
        self.same = nn.Conv2d(4, 4, 3)
        self.embed = nn.Embedding(10, 6)

    def forward(self, x):
        return self.square(x)


def peft(name: str, config, words: tuple[str, ...], scale: float = 0.3) -> None:
    """A file of PEFT's, with all parameters of these words random, and what it merges."""
    from peft import get_peft_model

    torch.manual_seed(len(name))
    base, model = Small().double(), Small().double()
    model.load_state_dict(base.state_dict())
    wrapped = get_peft_model(model, config).double()
    for key, value in wrapped.named_parameters():
        if any(word in key for word in words):
            gain = any(word in key for word in ("_s.", "ia3_l"))
            with torch.no_grad():
                value.copy_((torch.randn_like(value) * scale + gain).float())
    folder = tempfile.mkdtemp()
    wrapped.save_pretrained(folder)
    adapter = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
    text = (pathlib.Path(folder) / "adapter_config.json").read_text()
    shutil.rmtree(folder)
    done = wrapped.merge_and_unload()
    merged = {}
    for layer, module in done.named_modules():
        own = dict(base.named_modules()).get(layer)
        if type(module) in KINDS and not torch.equal(module.weight, own.weight):
            merged[f"{layer}.weight::1.0"] = module.weight
            if getattr(module, "bias", None) is not None and not torch.equal(module.bias, own.bias):
                merged[f"{layer}.bias::1.0"] = module.bias
    assert merged, name
    write(f"inputs_{name}", base, adapter, merged, {"config": text})


def glora(name: str, layer: str) -> None:
    """A file of LyCORIS'."""
    from lycoris.modules.glora import GLoRAModule, _glora_weight

    torch.manual_seed(len(name))
    model = Small().double()
    org = model.get_submodule(layer)
    module = GLoRAModule("x", org, 1.0, lora_dim=3, alpha=2.0).double()
    for value in module.parameters():
        with torch.no_grad():
            value.copy_((torch.randn_like(value) * 0.3).float())
    state = {f"lycoris_{layer}.{key}": value.float() for key, value in module.custom_state_dict().items()}
    parts = [getattr(module, part).weight for part in ("a1", "a2", "b1", "b2")]
    delta = _glora_weight(org.weight, *parts, None, module.scale)
    merged = {f"{layer}.weight::{m}": (org.weight + m * delta).detach() for m in (1.0, 0.5, 0.0)}
    write(f"inputs_{name}", model, state, merged, {})


def old() -> None:
    """Files of earlier versions of PEFT."""
    from peft import OFTConfig

    version = importlib.metadata.version("peft").replace(".", "_").rsplit("_", 1)[0]
    # The first of them divided outputs, those after it inputs.
    for name, r, share in (("", 4, False), ("_shared", 2, True)):
        config = OFTConfig(r=r, block_share=share, init_weights=False, target_modules=["lin", "square"])
        peft(f"peft_{version}_oft{name}", config, ("oft_r", "oft_s"))
        config = OFTConfig(
            r=r, block_share=share, init_weights=False, target_modules=["lin", "square", "same"], coft=True, eps=0.09
        )
        peft(f"peft_{version}_coft{name}", config, ("oft_r", "oft_s"))
    peft(f"peft_{version}_oft_conv", OFTConfig(r=2, init_weights=False, target_modules=["same"]), ("oft_r", "oft_s"))


def main() -> None:
    import peft.tuners.boft.layer as boft
    from peft import BOFTConfig, IA3Config, LoraConfig, OFTConfig

    every = ["lin", "square", "point"]
    options = {"init_weights": False, "target_modules": every}
    peft("peft_oft", OFTConfig(r=0, oft_block_size=4, **options), ("oft_R",), 0.1)
    peft("peft_oft_terms", OFTConfig(r=2, oft_block_size=0, num_cayley_neumann_terms=3, **options), ("oft_R",), 0.1)
    peft("peft_oft_exact", OFTConfig(r=2, oft_block_size=0, use_cayley_neumann=False, **options), ("oft_R",))
    peft("peft_oft_shared", OFTConfig(r=0, oft_block_size=4, block_share=True, **options), ("oft_R",), 0.1)
    peft("peft_coft", OFTConfig(r=0, oft_block_size=4, coft=True, eps=0.5, **options), ("oft_R",), 0.1)
    shared = OFTConfig(r=2, oft_block_size=0, coft=True, eps=0.1, block_share=True, use_cayley_neumann=False, **options)
    peft("peft_coft_shared", shared, ("oft_R",), 0.1)
    vectors = OFTConfig(r=0, oft_block_size=3, init_weights=False, target_modules=["embed"])
    peft("peft_oft_embedding", vectors, ("oft_embedding_R",), 0.1)
    vectors = OFTConfig(r=0, oft_block_size=3, init_weights=False, target_modules=["embed"], coft=True, eps=0.2)
    peft("peft_coft_embedding", vectors, ("oft_embedding_R",), 0.1)
    decomposed = LoraConfig(r=3, lora_alpha=5, target_modules=["embed", "lin"], use_dora=True)
    peft("peft_embedding_dora", decomposed, ("lora_",))
    peft("peft_boft", BOFTConfig(boft_block_size=4, **options), ("boft_R", "boft_s"))

    class Blocks:
        """What its CUDA extension computes: block-diagonal matrices of batches of blocks."""

        @staticmethod
        def apply(blocks):
            return torch.stack([torch.block_diag(*one) for one in blocks])

    boft.get_fbd_cuda = lambda: True
    boft.FastBlockDiag = Blocks
    two = BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, **options)
    peft("peft_boft_two", two, ("boft_R", "boft_s"))
    options["target_modules"] = ["same"]
    for factor in (1, 2):
        config = BOFTConfig(boft_block_size=6, boft_n_butterfly_factor=factor, **options)
        peft(f"peft_boft_conv{factor}", config, ("boft_R", "boft_s"))
    options["target_modules"] = ["lin"]
    three = BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=3, **options)
    peft("peft_boft_three", three, ("boft_R", "boft_s"))
    factors = IA3Config(target_modules=[*every, "conv", "same"], feedforward_modules=["square", "same", "point"])
    peft("peft_ia3", factors, ("ia3_l",))
    peft("peft_embedding", LoraConfig(r=3, lora_alpha=5, target_modules=["embed", "lin"]), ("lora_",))
    for layer in ("lin", "square", "point", "conv", "same"):
        glora(f"glora_{layer}", layer)


if __name__ == "__main__":
    old() if sys.argv[1:] == ["old"] else main()
