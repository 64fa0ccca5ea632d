"""Adapters of inputs, and factors: one for a layer of a shape, and what it makes of the layer's weight in float64. Each is written out from
its trainer's definition, as whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Optional

import torch
from torch import Tensor

Change = Callable[[Tensor, float], Tensor]
Random = Callable[..., Tensor]
Made = tuple[dict[str, Tensor], Change]


def turned(stages: Iterable[Tensor], gain: Optional[Tensor] = None) -> Change:
    """Matrices of all inputs that multiply each row of the weight, one after the other; then factors of the rows."""

    def change(weight: Tensor, multiplier: float) -> Tensor:
        for stage in stages:
            one = torch.eye(len(stage), dtype=torch.float64)
            weight = weight @ (one + multiplier * (stage.double() - one)).t()
        return weight if gain is None else weight * (1 + multiplier * (gain.double().reshape(-1, 1) - 1))

    return change


def _cayley(half: Tensor) -> Tensor:
    skew = (half - half.transpose(-1, -2)).double() / 2
    one = torch.eye(skew.shape[-1], dtype=torch.float64)
    return (one - skew) @ torch.linalg.inv(one + skew)


def peft_oft(random: Random, shape: tuple[int, ...]) -> Made:
    packed = random(shape[1] // 8, 28, scale=0.05)
    above = torch.triu(torch.ones(8, 8), 1).bool()
    blocks = []
    for row in packed.double():
        skew = torch.zeros(8, 8, dtype=torch.float64)
        skew[above] = row
        skew = skew - skew.t()
        powers = [torch.matrix_power(skew, n) for n in range(5)]
        blocks.append(powers[0] + 2 * (powers[1] + powers[2] + powers[3]) + powers[4])
    return {"oft_R.weight": packed}, turned([torch.block_diag(*blocks)])


def peft_oft_matrices(random: Random, shape: tuple[int, ...]) -> Made:
    half, gain = random(4, shape[1] // 4, shape[1] // 4), 1 + random(shape[0], 1)
    return {"oft_r": half, "oft_s": gain}, turned([torch.block_diag(*_cayley(half))], gain)


def peft_oft_outputs(random: Random, shape: tuple[int, ...]) -> Made:
    half = random(4, shape[0] // 4, shape[0] // 4)
    whole = torch.block_diag(*_cayley(half)).t()

    def change(weight: Tensor, multiplier: float) -> Tensor:
        return weight + multiplier * (whole @ weight - weight)

    return {"oft_r": half}, change


def peft_boft(random: Random, shape: tuple[int, ...]) -> Made:
    half, gain = random(3, shape[1] // 4, 4, 4), 1 + random(shape[0], 1)
    stages = []
    for number, blocks in enumerate(_cayley(half)):
        # Halves of blocks, two elements each, that lie 2^number apart meet in one.
        order = torch.arange(shape[1] // 2).reshape(-1, 2, 2**number).transpose(1, 2).flatten()
        places = (order.reshape(-1, 1) * 2 + torch.arange(2)).flatten()
        gather = torch.eye(shape[1], dtype=torch.float64)[places]
        stages.append(gather.t() @ torch.block_diag(*blocks) @ gather)
    return {"boft_R": half, "boft_s": gain}, turned(stages, gain)


def ia3_inputs(random: Random, shape: tuple[int, ...]) -> Made:
    factors = 1 + random(1, shape[1])
    return {"ia3_l": factors}, turned([torch.diag(factors.double().flatten())])


def ia3_outputs(random: Random, shape: tuple[int, ...]) -> Made:
    factors = 1 + random(shape[0], 1)

    def change(weight: Tensor, multiplier: float) -> Tensor:
        return weight * (1 + multiplier * (factors.double() - 1))

    change.bias = lambda bias, multiplier: bias * (1 + multiplier * (factors.double().flatten() - 1))
    return {"ia3_l": factors}, change


def glora(random: Random, shape: tuple[int, ...]) -> Made:
    a1, a2, b2 = random(shape[1], 3), random(3, shape[1]), random(3, *shape[1:])
    ones = [1] * (len(shape) - 2)
    b1 = random(shape[0], 3)
    moved, delta = a1.double() @ a2.double(), (b1.double() @ b2.double().flatten(1)).reshape(shape)

    def change(weight: Tensor, multiplier: float) -> Tensor:
        return weight + multiplier * 0.5 * (torch.einsum("oi...,ij->oj...", weight, moved) + delta)

    tensors = {"a1": a1, "a2": a2, "b1": b1}
    tensors = {f"{name}.weight": value.reshape(*value.shape, *ones) for name, value in tensors.items()}
    return {**tensors, "b2.weight": b2, "alpha": torch.tensor(1.5)}, change
