"""What a weight holds beside its own bytes, as layers of other quantizers do: it streams with the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attach_models import Towered, assert_same_state, attached, host, inputs, run, same_bits, snapshot
from torch import nn
from torch.nn import functional as F

import weightstream


class State:
    """Scales, and the state of the scales."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = (scale / scale.max() * 255).round().to(torch.uint8)
        self.inner = {"factor": [scale.max() / 255]}
        self.name = "state"
        self.empty = None


class CodedParameter(nn.Parameter):
    """A parameter of a class of its own, as libraries have them."""


class Coded(nn.Module):
    """A linear layer whose weight is packed, with its scales in an attribute of the parameter."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        weight = torch.randn(dim, dim)
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        self.weight = torch.Tensor._make_subclass(CodedParameter, codes, False)
        self.weight.quant_state = State(scale.repeat(1, dim // 4))
        self.bias = nn.Parameter(torch.randn(dim))

    def dense(self) -> torch.Tensor:
        state = self.weight.quant_state
        scale = state.scale.float() * state.inner["factor"][0]
        return self.weight.float() * scale.repeat_interleave(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.dense(), self.bias) / 64

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scale = self.weight.quant_state.scale
        destination[prefix + "weight.scale"] = scale if keep_vars else scale.detach()


class Kept(nn.Module):
    """A layer whose state has the weight's bytes, too, and puts them back after each forward."""

    class State:
        codes: Any = None
        scale: Any = None

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        weight = torch.randn(dim, dim)
        scale = weight.abs().amax(1) / 127
        self.state = Kept.State()
        self.weight = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.weight.scale = scale
        self.other = {"unrelated": object()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.scale is not None:
            self.state.codes, self.state.scale = self.weight.data, self.weight.scale
            self.weight.scale = None
        y = x + F.linear(x, self.state.codes.float() * self.state.scale[:, None]) / 64
        self.weight.data = self.state.codes
        return y


def model(cls: type[nn.Module], blocks: int = 8) -> Towered:
    torch.manual_seed(0)
    return Towered([cls() for _ in range(blocks)])


def test_scales_of_a_parameter_stream_with_it() -> None:
    coded = model(Coded)
    x = inputs()
    expected, state = run(coded, x), snapshot(coded)
    scales = [block.weight.quant_state.scale for block in coded.blocks]
    with attached(coded, device=host(), budget="36KiB") as attachment:
        for _ in range(3):
            assert same_bits(run(coded, x), expected)
        assert attachment.stats()["copies"] > 0
        report = attachment.report()
        assert report["model_bytes"] >= sum(
            block.weight.nbytes + scale.nbytes for block, scale in zip(coded.blocks, scales)
        )
        # Saved from the host, whatever is behind the addresses now; the layers put the scales there themselves.
        assert_same_state(coded, state)
        assert all(block.weight.quant_state.scale is scale for block, scale in zip(coded.blocks, scales))
    assert same_bits(run(coded, x), expected)
    assert_same_state(coded, state)
    assert all(block.weight.quant_state.scale is scale for block, scale in zip(coded.blocks, scales))


@pytest.mark.parametrize("ran", [False, True])
def test_a_state_with_the_weights_own_bytes_streams(ran: bool) -> None:
    kept, other = model(Kept), model(Kept)
    x = inputs()
    expected = run(other, x)
    if ran:
        run(kept, x)
    with attached(kept, device=host(), budget="24KiB") as attachment:
        if ran:
            for _ in range(3):
                assert same_bits(run(kept, x), expected)
            assert attachment.stats()["copies"] > 0
        else:
            # Such a layer takes its bytes in its first forward: PyTorch's `data` is then a view that nobody can follow.
            run(kept, x)
    run(kept, x)


def test_other_data_is_refused_still() -> None:
    kept = model(Kept)
    run(kept, inputs())
    with attached(kept, budget="24KiB"):
        weight = kept.blocks[0].weight
        for data in (weight.data.clone(), weight.data.view(-1), weight.data[:1], None):
            with pytest.raises((weightstream.StateError, TypeError)):
                weight.data = data


def test_what_cannot_be_placed_is_refused_by_name() -> None:
    coded = model(Coded)
    coded.blocks[2].weight.quant_state.scale = torch.eye(4).to_sparse()
    before = dict(coded.named_parameters())
    with pytest.raises(weightstream.ModelError, match=r"blocks\.2\.weight\.quant_state\.scale .*sparse"):
        weightstream.attach(coded, device=host(), budget="36KiB")
    assert all(before[name] is value for name, value in coded.named_parameters())
