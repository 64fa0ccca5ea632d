"""A diffusion transformer, whole or sharded over the processes of a group."""

from __future__ import annotations

import os
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..errors import ModelError, WeightsError
from ..offload.applying import expected_names
from ..offload.loading import load_model_data, load_sd
from ..startup.phases import phase
from ..towers import find_towers
from .common import Path, config_of, construct, default_dtype, library_class

__all__ = ["TransformerLoader", "is_fsdp"]


def is_fsdp(model: Any) -> bool:
    """Whether the module is one that FSDP shards, asked of the module itself."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


class TransformerLoader:
    """Loads a transformer of diffusers from its component's folder.

    Its phases are `transformer.construct` (on the meta device), `transformer.shard_setup` (next to nothing unless sharded),
    `transformer.hydrate` (files read, converted, assigned and moved), `transformer.finalize` (buffers, evaluation) and
    `transformer.compile_setup` (registration only; the first use compiles).
    """

    def __init__(
        self,
        device: Union[str, torch.device] = "cpu",
        dtype: Optional[torch.dtype] = None,
        *,
        fsdp: bool = False,
        compile: bool = False,
        allow_trailing: bool = False,
    ) -> None:
        """device: where it computes. dtype: of its parameters; None keeps the file's. fsdp: shard blocks over the default
        process group, which has to be there. compile: let `torch.compile` have its blocks.
        allow_trailing: as for `offload.load_sd`."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.fsdp = fsdp
        self.compile = compile
        self.allow_trailing = allow_trailing

    def load(self, path: Path) -> nn.Module:
        """The transformer in the folder, ready to use."""
        config = config_of(path)
        model_class = library_class("diffusers", config.get("_class_name"), str(path))
        with phase("transformer.construct"), default_dtype(self.dtype):
            model = construct(model_class, config, str(path))
        with phase("transformer.shard_setup"):
            if self.fsdp:
                self._shard(model)
        with phase("transformer.hydrate") as hydrate:
            hydrate.count("tensors", len(expected_names(model)))
            if self.fsdp:
                self._fill_shards(model, path)
            else:
                load_model_data(model, os.fspath(path), default_dtype=self.dtype, allow_trailing=self.allow_trailing)
                model.to(self.device)
        with phase("transformer.finalize"):
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.device)
            model.requires_grad_(False).eval()
        with phase("transformer.compile_setup"):
            if self.compile:
                for block in self._blocks(model):
                    block.compile()
        return model

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """Its repeated blocks."""
        return [block for tower in find_towers(model) for _, block in tower.blocks]

    def _shard(self, model: nn.Module) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ModelError("fsdp=True needs a process group: call torch.distributed.init_process_group first")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (torch.distributed.get_world_size(),))
        for block in self._blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def _fill_shards(self, model: nn.Module, path: Path) -> None:
        """Gives each process its part of each weight."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        weights, _, _ = load_sd(os.fspath(path), allow_trailing=self.allow_trailing)
        wanted = expected_names(model)
        missing, unused = sorted(set(wanted).difference(weights)), sorted(set(weights).difference(wanted))
        if missing or unused:
            names = ", ".join([*missing, *unused][:8])
            raise WeightsError(f"{path} does not fit {type(model).__name__}: missing or not used are {names}")
        filled: dict[str, Tensor] = {}
        for name, tensor in wanted.items():
            given = weights[name].to(self.device, self.dtype if tensor.is_floating_point() else None)
            if isinstance(tensor, DTensor):
                given = distribute_tensor(given, tensor.device_mesh, tensor.placements)
            filled[name] = given
        model.load_state_dict(filled, strict=True, assign=True)
