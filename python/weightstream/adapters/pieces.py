"""An adapter's tensors for one layer, as a plan names them, made into what layers compute with.

Numbers are converted here and never on the way to the device: 8-bit floats become the layer's type, and what a product is made
of in float32 is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import WeightsError
from .filters import FilterRotationTerm, VectorRotationTerm
from .inputs import FactorTerm, InputFactorTerm, InputLowRankTerm, InputRotationTerm
from .layers import AdaptedLayer
from .rotations import input_stages, output_stages
from .strengths import Strengths
from .terms import FullTerm, HadamardTerm, KroneckerTerm, RotationTerm, Term

__all__ = ["LowRank", "Piece", "read_pieces"]

_MOST_EXPANDED = 64
"""A Hadamard product of two low-rank products is a low-rank product of their ranks' product. Up to this rank it is stacked
with the others, which moves few bytes; above, it is formed where it is used."""

_ROTATIONS = {
    "oft_inputs": "input rotation",
    "boft_inputs": "input rotation",
    "oft_vectors": "vector rotation",
}
"""Kinds of a plan that rotate, all but those of outputs."""

_MATRICES = (
    *("up", "w1", "w1_a", "w1_b", "w2_a", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    *("embedding_a", "embedding_b", "input_up", "input_down"),
)
"""Parts that are matrices, of any layer."""

Rows = Optional[tuple[int, int]]


@dataclass
class LowRank:
    """Two factors: rank by inputs, outputs by rank. For convolutions the lower one has the filter."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """Rows of the lower factor."""
        return len(self.down)


@dataclass
class Piece:
    """What one adapter does to one layer. Either it is low-rank, or it is one of the other kinds by its name."""

    kind: str
    scale: float
    rows: Rows = None
    cut: Rows = None
    low: Optional[LowRank] = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bias: Optional[Tensor] = None
    """What is added to the outputs."""
    magnitude: Optional[Tensor] = None
    axis: int = 0

    def term(self, strengths: Strengths, adapter: int) -> Optional[Term]:
        """The module that computes it; None if it is low-rank or a bias alone."""
        if self.low is not None or not self.tensors:
            return None
        parts = self.tensors
        scale = 1.0 if self.kind in ("oft", "boft") else self.scale
        pattern = strengths.pattern([(adapter, scale, 1)])
        if self.kind == "lokr":
            first = [parts["w1"]] if "w1" in parts else [parts["w1_a"], parts["w1_b"]]
            second = [parts["w2"]] if "w2" in parts else [parts["w2_a"], parts["w2_b"]]
            return KroneckerTerm(pattern, first, second, self.rows, self.cut)
        if self.kind == "loha":
            pairs = [(parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"]) for n in (1, 2)]
            return HadamardTerm(pattern, pairs[0], pairs[1], self.rows, self.cut)
        if self.kind in ("oft", "boft"):
            return RotationTerm(pattern, parts["stages"], parts.get("rescale"), self.kind == "boft", self.rows)
        if self.kind == "input rotation":
            return InputRotationTerm(pattern, parts["stages"])
        if self.kind == "filter rotation":
            return FilterRotationTerm(pattern, parts["stages"])
        if self.kind == "vector rotation":
            return VectorRotationTerm(pattern, parts["stages"])
        if self.kind == "input low-rank":
            return InputLowRankTerm(pattern, parts["down"], parts["up"])
        if self.kind == "input factors":
            return InputFactorTerm(pattern, parts["factors"])
        if self.kind in ("factors", "gain"):
            return FactorTerm(pattern, parts["factors"], self.kind == "factors", self.rows)
        return FullTerm(pattern, parts["diff"], self.rows, self.cut)


def read_pieces(target: Any, tensors: Mapping[str, Tensor], layer: AdaptedLayer) -> list[Piece]:
    """What a target of a plan comes down to, with its tensors in the type that the layer computes in."""
    parts = {role: _flat(role, part, layer) for role, part in _parts(target, tensors).items()}
    rows, dtype = _pair(target.rows), layer.dtype
    made: list[Piece] = []
    if target.kind in _ROTATIONS:
        kind = _ROTATIONS[target.kind]
        if kind == "input rotation" and any(size != 1 for size in layer.shape[2:]):
            kind = "filter rotation"
        stages = {"stages": _turned(layer, lambda: input_stages(parts, target.series, target.constraint))}
        made.append(Piece(kind, 1.0, tensors=stages))
        if "gain" in parts:
            made.append(Piece("gain", 1.0, rows, tensors={"factors": parts["gain"]}))
    elif target.kind == "ia3":
        made.append(
            Piece("input factors" if target.axis == 1 else "factors", 1.0, rows, tensors={"factors": parts["scales"]})
        )
    else:
        if target.kind == "glora":
            up, down = (parts[f"input_{name}"].flatten(1) for name in ("up", "down"))
            pair = {"up": _as(up, dtype), "down": _as(down, dtype)}
            made.append(Piece("input low-rank", float(target.scale), tensors=pair))
        made.append(_read_piece(target, parts, layer, dtype))
    return made


def _parts(target: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {role: _cut(tensors[key], first, past) for role, (key, first, past) in target.parts.items()}


def _flat(role: str, part: Tensor, layer: AdaptedLayer) -> Tensor:
    """A factor without dimensions of 1 behind its first two, which plans accept of every factor that is a matrix."""
    inner = len(layer.shape) == 2 and role in ("down", "diff", "w2", "w2_b")
    if part.dim() > 2 and (inner or role in _MATRICES) and all(size == 1 for size in part.shape[2:]):
        return part.reshape(part.shape[:2])
    return part


def _read_piece(target: Any, parts: dict[str, Tensor], layer: AdaptedLayer, dtype: torch.dtype) -> Piece:
    piece = Piece(target.kind, float(target.scale), _pair(target.rows), _pair(getattr(target, "cut", None)))
    if "magnitude" in parts:
        piece.magnitude = parts.pop("magnitude").float().reshape(-1)
        piece.axis = int(target.axis or 0)
        if piece.axis == 1 and piece.rows is not None:
            raise WeightsError(
                f"{layer.name}: a DoRA adapter with a magnitude a column covers rows {piece.rows[0]} to {piece.rows[1]} of a "
                f"fused layer, whose columns are longer"
            )
    if "bias" in parts:
        piece.bias = parts.pop("bias").float()
    if target.kind in ("lora", "glora"):
        _read_low_rank(piece, parts, layer, dtype)
    elif target.kind == "loha":
        _read_hadamard(piece, parts, layer, dtype)
    elif target.kind == "lokr":
        core = parts.pop("t2", None)
        if core is not None:
            made = _core(core, parts.pop("w2_a"), parts.pop("w2_b"))
            parts["w2"] = made
        piece.tensors = {role: _as(part, dtype) for role, part in parts.items()}
    elif target.kind in ("oft", "boft"):
        # What was written as the bound of a rotation is no scale.
        piece.tensors = {
            "stages": _turned(
                layer,
                lambda: output_stages(parts, piece.scale, piece.kind, _outputs(piece, layer), target.constraint),
            )
        }
        if "rescale" in parts:
            piece.tensors["rescale"] = parts["rescale"].float()
        piece.scale = 1.0
    elif target.kind == "diff_bias":
        piece.bias = next(iter(parts.values())).float()
    else:
        diff = next(iter(parts.values()))
        piece.tensors = {"diff": _as(diff.t().contiguous() if target.transposed else diff, dtype)}
    return piece


def _turned(layer: AdaptedLayer, stages: Callable[[], Tensor]) -> Tensor:
    """Rotations, if there are such."""
    try:
        made = stages()
    except torch.linalg.LinAlgError:
        made = None
    if made is None or not torch.isfinite(made).all():
        raise WeightsError(
            f"{layer.name}: its rotation cannot be computed, since a matrix of it has no inverse or numbers of it are too large. The "
            f"file is damaged, or its training diverged"
        )
    return made


def _read_low_rank(piece: Piece, parts: dict[str, Tensor], layer: AdaptedLayer, dtype: torch.dtype) -> None:
    if "embedding_a" in parts:  # PEFT keeps both transposed
        parts = {"down": parts["embedding_b"].t().contiguous(), "up": parts["embedding_a"].t().contiguous()}
    down, up, mid = parts["down"], parts["up"], parts.get("mid")
    up = up.reshape(up.shape[0], -1)
    if mid is not None:
        made = _core(mid, up.t(), down.reshape(down.shape[0], -1))
        piece.tensors = {"diff": _as(made, dtype)}
        return
    piece.low = _low_rank(down.reshape(down.shape[0], *layer.shape[1:]), up, dtype)


def _low_rank(down: Tensor, up: Tensor, dtype: torch.dtype) -> LowRank:
    if dtype == torch.float16:
        down, up = _balanced(down, up)
    return LowRank(_as(down, dtype), _as(up, dtype))


def _read_hadamard(piece: Piece, parts: dict[str, Tensor], layer: AdaptedLayer, dtype: torch.dtype) -> None:
    cores = [parts.pop("hada_t1", None), parts.pop("hada_t2", None)]
    pairs = [(parts[f"hada_w{n}_a"].float(), parts[f"hada_w{n}_b"].float()) for n in (1, 2)]
    if cores[0] is not None and cores[1] is not None:
        made = [_core(core.float(), upper, lower) for core, (upper, lower) in zip(cores, pairs)]
        piece.kind, piece.tensors = "diff", {"diff": _as(made[0] * made[1], dtype)}
        return
    if pairs[0][0].shape[1] * pairs[1][0].shape[1] <= _MOST_EXPANDED and piece.cut is None:
        up = torch.einsum("oi,oj->oij", pairs[0][0], pairs[1][0]).flatten(1)
        down = torch.einsum("in,jn->ijn", pairs[0][1].flatten(1), pairs[1][1].flatten(1)).flatten(0, 1)
        piece.low = _low_rank(down.reshape(down.shape[0], *layer.shape[1:]), up, dtype)
        return
    piece.tensors = {role: _as(part, dtype) for role, part in parts.items()}


def _core(core: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """A product with a core between its factors: the filter of a convolution."""
    return torch.einsum("ij...,ip,jr->pr...", core.float(), upper.float(), lower.float()).contiguous()


def _balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with factors of like size, by powers of two: float16 overflows where one of them is large."""
    one = down.float().flatten(1).norm(dim=1).clamp_min(1e-30)
    two = up.float().norm(dim=0).clamp_min(1e-30)
    power = torch.exp2(torch.round((torch.log2(one) - torch.log2(two)) / 2))
    return down.float() / power.reshape(-1, *[1] * (down.dim() - 1)), up.float() * power


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another type; numbers that it cannot hold become the largest that it can."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        tensor = tensor.float().clamp(-largest, largest)
    return tensor.to(dtype)


def _cut(tensor: Tensor, first: Optional[int], past: Optional[int]) -> Tensor:
    return tensor if first is None else tensor[first:past]


def _outputs(piece: Piece, layer: AdaptedLayer) -> int:
    """Outputs that it changes."""
    return layer.shape[0] if piece.rows is None else piece.rows[1] - piece.rows[0]


def _pair(rows: Any) -> Rows:
    return None if rows is None else (int(rows[0]), int(rows[1]))
