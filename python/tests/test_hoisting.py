"""Which modules anchor the segments of the usual blocks, and that fewer anchors change no bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attach_models import Towered, attached, inputs, run, same_bits
from planning_replay import check_plan, check_replay, record
from torch import nn

import weightstream
from weightstream.segments import plan_segments, small_tensors
from weightstream.steps import ModelSteps

DIM = 64


class Attention(nn.Module):
    """Projections of given names, of which the last comes behind the others."""

    def __init__(self, names: str = "qkvo", narrow: int = DIM) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(DIM, narrow if name in "kv" else DIM, bias=False))
        self.names = names

    def forward(self, x):
        *first, last = (getattr(self, name) for name in self.names)
        parts = [layer(x).mean(-1, keepdim=True) for layer in first]
        return last(x * sum(parts))


class Mlp(nn.Module):
    """Layers of a width in a row; the last one comes back."""

    def __init__(self, width: int, ups: int = 1) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(DIM, width) for _ in range(ups))
        self.down = nn.Linear(width, DIM)

    def forward(self, x):
        return self.down(F.gelu(sum(up(x) for up in self.ups)))


class Block(nn.Module):
    """Named parts one after the other, those that take the model's width with a norm before them."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        for name, part in parts.items():
            setattr(self, name, part)
        self.names = tuple(parts)

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(self.norm(x) if x.shape[-1] == DIM else x)
        return x


class Projected(nn.Module):
    """BERT's attention: its projections in one module, the output in another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.output = Attention("qkv"), nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))

    def forward(self, x):
        return self.output(self.inner(x))


class Modulated(nn.Module):
    """Flux's norm: one large layer inside a module that does more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, 6 * DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        return self.norm(x) + self.linear(F.silu(x))[..., :DIM]


BLOCKS = {
    "dit": (
        lambda: Block(a=Attention(), x=Attention(), f1=nn.Linear(DIM, DIM * 2), f2=nn.Linear(DIM * 2, DIM)),
        ["a", "x", "f1", "f2"],
    ),
    "llama": (
        lambda: Block(attention=Attention(narrow=16), mlp=Mlp(220, ups=2)),
        ["attention", "mlp.ups.0", "mlp.ups.1", "mlp.down"],
    ),
    "bert": (
        lambda: Block(attention=Projected(), mlp=Mlp(4 * DIM)),
        ["attention", "mlp.ups.0", "mlp.down"],
    ),
    "narrow bert": (
        lambda: Block(attention=Projected(), mlp=Mlp(2 * DIM)),
        ["attention.inner", "attention.output.0", "mlp.ups.0", "mlp.down"],
    ),
    "flux": (
        lambda: Block(
            norm1=Modulated(), norm2=Modulated(), attn=Attention("qkvoabcd"), ff=Mlp(4 * DIM), ff_context=Mlp(4 * DIM)
        ),
        ["norm1.linear", "norm2.linear", "attn", "ff", "ff_context"],
    ),
}


def towered(make) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleList([make() for _ in range(2)]).requires_grad_(False)
    model.forward = lambda x: model[1](model[0](x))
    return model


def anchors(model: nn.Module, runs: int = 1) -> list[str]:
    """The anchors of the first block's coarse segments, checked by replay."""
    ownership, trace, _ = record(model, lambda: [model(torch.randn(3, DIM)) for _ in range(runs)])
    small = small_tensors(ownership)
    plan = plan_segments(ownership, [trace], coarse=True)
    check_plan(ownership, plan, small)
    assert check_replay(plan, trace, small) == plan.order
    names = {id(module): name for name, module in model[0].named_modules()}
    assert all(segment.last_calls == 1 for segment in plan.blocks[0].segments)
    return [" ".join(names[id(anchor)] for anchor in segment.anchors) for segment in plan.blocks[0].segments]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_outermost_module_that_is_not_too_large_is_the_anchor(name):
    make, expected = BLOCKS[name]
    assert anchors(towered(make)) == expected


def test_a_block_that_runs_twice_in_a_step_has_the_same_anchors():
    make, expected = BLOCKS["dit"]
    assert anchors(towered(make), runs=2) == expected


def test_a_module_that_is_called_twice_does_not_stand_for_what_is_in_it():
    model = towered(BLOCKS["dit"][0])
    for block in model:
        block.names = ("a", "a", "x", "f1", "f2")
    ownership, trace, _ = record(model, lambda: model(torch.randn(3, DIM)))
    plan = plan_segments(ownership, [trace], coarse=True)
    check_replay(plan, trace, small_tensors(ownership))
    first = plan.blocks[0].segments[0]
    assert model[0].a not in first.anchors and set(first.anchors) == {model[0].a.get_submodule(n) for n in "qkvo"}


def test_where_coarse_cuts_would_leave_one_segment_the_finest_are_taken():
    class Outward(nn.Module):
        """Calls a layer that is registered behind all others."""

        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(DIM, DIM, bias=False)

        def forward(self, x):
            return self.other[0](self.own(x))

    model = towered(lambda: Block(a=Outward(), mlp=Mlp(4 * DIM), far=nn.Linear(DIM, DIM, bias=False)))
    for block in model:
        block.a.other = [block.far]
        block.names = ("a", "mlp")
    assert anchors(model) == ["a.own", "far mlp.ups.0 mlp.down"]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("share", [0.45, 0.7, 2.0])
@pytest.mark.parametrize("grad", [False, True])
def test_hoisted_turns_change_no_bit(name, share, grad):
    torch.manual_seed(0)
    model = Towered([BLOCKS[name][0]() for _ in range(5)]).eval().requires_grad_(False)
    x, hidden = inputs(), torch.randn(2, 5, DIM)
    want, alone = run(model, x), run(model.blocks[1], hidden)
    part, inside = next((n, m) for n, m in model.blocks[2].named_children() if n != "norm")
    piece = run(inside, hidden)
    with attached(model, share) as attachment:
        for _ in range(4):
            with torch.set_grad_enabled(grad):
                assert same_bits(model(x), want)
            assert same_bits(run(model.blocks[1], hidden), alone)
            assert same_bits(run(inside, hidden), piece), part
            assert attachment._runtime.open == []
        assert (attachment.stats()["copies"] > 0) == (share < 1)


def test_each_hoisted_call_is_one_turn_and_the_block_none():
    torch.manual_seed(0)
    model = Towered([BLOCKS["dit"][0]() for _ in range(5)]).eval().requires_grad_(False)
    seen = []
    inner = model.blocks[3].a.q.forward
    model.blocks[3].a.q.forward = lambda x: (seen.append(list(attachment._runtime.open)), inner(x))[1]
    with attached(model, 2.0) as attachment:
        for _ in range(3):
            run(model, inputs())
        units = {attachment._runtime.unit_of[n] for n in attachment._ownership.blocks[3].tensors} - {-(1 << 62)}
        assert len(units) == 4 and set(attachment.report()["segments"].values()) == {4}
        assert seen[0] != seen[2] == [-1, min(units)]
        model.blocks[3].a.q.forward = inner


def test_an_input_that_requires_grad_is_refused_at_the_block():
    torch.manual_seed(0)
    model = Towered([BLOCKS["dit"][0]() for _ in range(3)]).eval().requires_grad_(False)
    with attached(model, 2.0):
        run(model, inputs())
        with pytest.raises(weightstream.WeightstreamError, match=r"an input of blocks\.1 requires grad"):
            model.blocks[1](torch.randn(1, DIM, requires_grad=True))
        run(model, inputs())


def test_the_finest_cuts_are_taken_where_the_planner_finds_them_faster(monkeypatch):
    torch.manual_seed(0)
    model = Towered([BLOCKS["dit"][0]() for _ in range(4)]).eval().requires_grad_(False)
    x = inputs()
    want = run(model, x)
    found = []
    predict = ModelSteps._cost

    def noted(self, division):
        found.append((division, predict(self, division)))
        return found[-1][1]

    monkeypatch.setattr(ModelSteps, "_cost", noted)
    with attached(model, 2.0) as attachment:
        run(model, x)
        (coarse, cost), (fine, finest_cost) = found
        assert len(coarse.order) < len(fine.order)
        assert cost <= finest_cost * 1.004
        assert sum(attachment.report()["segments"].values()) == len(coarse.order)
    found.clear()

    def slow_if_coarse(self, division):
        noted(self, division)
        return 2.0 if len(found) == 1 else 1.0

    monkeypatch.setattr(ModelSteps, "_cost", slow_if_coarse)
    # The choice by prediction alone: nothing is measured and planned again.
    monkeypatch.setattr("weightstream.steps.Pacing", lambda *_: None)
    with attached(model, 0.3) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), want)
        assert sum(attachment.report()["segments"].values()) == len(found[1][0].order)
