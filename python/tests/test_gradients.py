"""A tensor that requires grad is refused at a block's edge, whatever it is wrapped in."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from attach_models import DIM, MlpBlock, Towered, attached, inputs, run, same_bits
from torch import nn
from torch.utils import _pytree

from weightstream import ForwardError


@dataclasses.dataclass
class Carried:
    hidden: Any


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("hidden",)
    hidden: Any


class Named(NamedTuple):
    hidden: Any


class Plain:
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Registered:
    """Keeps its tensor where only its pytree functions find it."""

    def __init__(self, hidden: Any) -> None:
        self.get = lambda: hidden

    hidden = property(lambda self: self.get())


_pytree.register_pytree_node(Registered, lambda node: ([node.hidden], None), lambda parts, _: Registered(parts[0]))


class UserMapping(collections.UserDict):
    pass


class OutputLike(collections.OrderedDict):
    """A mapping with attributes, as transformers' outputs are."""

    def __init__(self, hidden: Any) -> None:
        super().__init__(hidden=hidden)
        self.__dict__["hidden"] = hidden


WAYS = {
    "dataclass": Carried,
    "frozen, with slots": Slotted,
    "namedtuple": Named,
    "object": Plain,
    "pytree node": Registered,
    "namespace": lambda h: types.SimpleNamespace(hidden=h),
    "mapping": lambda h: UserMapping(hidden=h),
    "output": OutputLike,
    "set": lambda h: {h},
    "frozenset": lambda h: frozenset([h]),
    "deque": lambda h: collections.deque([h]),
    "mapping proxy": lambda h: types.MappingProxyType({"hidden": h}),
    "nested": lambda h: [Carried({"a": (Plain({h}),)})],
}


def _open(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        if isinstance(value, (dict, collections.UserDict, types.MappingProxyType)):
            value = next(iter(value.values()))
        elif hasattr(value, "hidden"):
            value = value.hidden
        else:
            value = next(iter(value))
    return value


class Carrying(MlpBlock):
    """Takes and gives its hidden states wrapped."""

    wrap: Any = None

    def forward(self, x: Any) -> Any:
        return type(self).wrap(super().forward(_open(x)))


def _model(way: str) -> Towered:
    class Block(Carrying):
        wrap = staticmethod(WAYS[way])

    class Model(Towered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = WAYS[way](self.stem(x))
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(_open(hidden))

    torch.manual_seed(0)
    return Model([Block() for _ in range(5)])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_wrapped_inputs_and_outputs_that_require_grad(way: str, steps: int) -> None:
    model = _model(way)
    x = inputs()
    expected = run(model, x)
    with attached(model):
        for _ in range(steps):
            assert same_bits(run(model, x), expected)
        assert same_bits(model(x), expected)  # nothing requires grad: served with grad enabled too
        with pytest.raises(ForwardError, match="input of blocks.0 requires grad"):
            model(x.clone().requires_grad_())
        with pytest.raises(ForwardError, match="input of blocks.1 requires grad"):
            model.blocks[1](x=WAYS[way](torch.zeros(2, DIM, requires_grad=True)))
        adapter = nn.Linear(DIM, DIM)
        model.blocks[1].norm.forward = lambda h: adapter(h)
        with pytest.raises(ForwardError, match="output of blocks.1 requires grad"):
            model(x)
        del model.blocks[1].norm.forward
        assert same_bits(run(model, x.clone().requires_grad_()), expected)


def test_cycles_and_modules_among_the_arguments() -> None:
    class Block(MlpBlock):
        def forward(self, x: torch.Tensor, extra: Any) -> torch.Tensor:
            return super().forward(x)

    model = Towered([Block() for _ in range(4)])
    extra: dict[str, Any] = {"module": nn.Linear(3, 3), "text": "x", "none": None, "class": Plain}
    extra["self"] = [extra]
    with attached(model):
        model.blocks[0](torch.zeros(2, DIM), extra)
        extra["self"].append(torch.zeros(1, requires_grad=True))
        with pytest.raises(ForwardError, match="input of blocks.0"):
            model.blocks[0](torch.zeros(2, DIM), extra)
