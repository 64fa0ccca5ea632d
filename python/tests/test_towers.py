"""Towers: what is found by structure, what is left alone, and what `towers=` may say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightstream.errors import ModelError
from weightstream.towers import find_towers


class Block(nn.Module):
    """A block with a forward of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Namespace(nn.Module):
    """A module that only holds others and is never called."""


class Model(nn.Module):
    """Holds whatever it is given under the names it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def blocks(count: int, width: int = 8) -> list[Block]:
    return [Block(width) for _ in range(count)]


def shape(model: nn.Module, towers=None) -> dict[str, list[str]]:
    """Names of the towers and of their blocks."""
    return {tower.name: [name for name, _ in tower.blocks] for tower in find_towers(model, towers)}


@pytest.mark.parametrize(
    ("container", "found"),
    [
        (nn.ModuleList(blocks(1)), False),
        (nn.ModuleList(blocks(2)), True),
        (nn.ModuleDict({"a": Block()}), False),
        (nn.ModuleDict({"a": Block(), "b": Block()}), True),
        (nn.Sequential(*blocks(4)), False),
        (nn.Sequential(*blocks(5)), True),
    ],
)
def test_a_list_is_a_tower_from_its_least_length_on(container, found):
    assert (list(shape(Model(layers=container))) == ["layers"]) is found


def test_five_numbered_siblings_of_one_class_are_a_tower_in_numeric_order():
    model = Model(stem=nn.Linear(8, 8), **{f"block_{i}": Block() for i in (10, 2, 0, 1, 3)}, head=nn.Linear(8, 8))
    assert shape(model) == {"block_*": ["block_0", "block_1", "block_2", "block_3", "block_10"]}


def test_fewer_siblings_other_classes_and_a_lone_digit_are_none():
    assert shape(Model(**{f"block_{i}": Block() for i in range(4)})) == {}
    mixed = {f"part{i}": Block() if i % 2 else nn.Linear(8, 8) for i in range(8)}
    assert shape(Model(**mixed)) == {}
    assert shape(Model(conv1=nn.Conv2d(1, 8, 3), fc2=nn.Linear(8, 8))) == {}


def test_a_list_with_less_than_its_share_of_the_bytes_stays_in_the_base():
    small = nn.ModuleList(blocks(2, width=2))
    assert shape(Model(embed=nn.Embedding(100, 8), projections=small)) == {}
    assert list(shape(Model(embed=nn.Embedding(10, 8), projections=small))) == ["projections"]


def test_the_outermost_list_wins():
    outer = nn.ModuleList([Model(inner=nn.ModuleList(blocks(3))) for _ in range(2)])
    assert list(shape(Model(layers=outer))) == ["layers"]


def test_blocks_that_cannot_be_called_make_their_lists_towers_of_their_own():
    stages = nn.ModuleList([nn.ModuleList(blocks(2)) for _ in range(3)])
    assert list(shape(Model(stages=stages))) == ["stages.0", "stages.1", "stages.2"]
    bare = [Namespace() for _ in range(2)]
    for level in bare:
        level.block = nn.ModuleList(blocks(2))
    assert list(shape(Model(up=nn.ModuleList(bare)))) == ["up.0.block", "up.1.block"]


class CallableList(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def test_lists_that_can_be_called_are_blocks_of_the_list_around_them():
    stages = nn.ModuleList([CallableList(blocks(2)) for _ in range(3)])
    assert shape(Model(stages=stages)) == {"stages": ["stages.0", "stages.1", "stages.2"]}


def test_a_unet_has_its_sides_and_what_its_middle_holds():
    middle = Model(attentions=nn.ModuleList(blocks(1)), resnets=nn.ModuleList(blocks(2)))
    down, up = (nn.ModuleList([Model(resnets=nn.ModuleList(blocks(2))) for _ in range(2)]) for _ in range(2))
    model = Model(conv_in=nn.Conv2d(4, 8, 3), mid_block=middle, down_blocks=down, up_blocks=up)
    assert list(shape(model)) == ["mid_block.resnets", "down_blocks", "up_blocks"]


def test_encoder_and_decoder_and_towers_beside_other_children_are_all_found():
    encoder = Model(layers=nn.ModuleList(blocks(2)))
    decoder = Model(norm=nn.LayerNorm(8), layers=nn.ModuleList(blocks(3)))
    model = Model(shared=nn.Embedding(8, 8), encoder=encoder, decoder=decoder)
    assert list(shape(model)) == ["encoder.layers", "decoder.layers"]


def test_a_module_listed_twice_is_one_block_and_a_list_of_one_module_none():
    first, second = blocks(2)
    assert shape(Model(layers=nn.ModuleList([first, second, first]))) == {"layers": ["layers.0", "layers.1"]}
    assert shape(Model(layers=nn.ModuleList([first, first, first]))) == {}


def test_a_list_registered_under_two_names_is_one_tower():
    layers = nn.ModuleList(blocks(3))
    assert list(shape(Model(layers=layers, alias=layers, parts=nn.ModuleList(list(layers))))) == ["layers"]


@pytest.mark.parametrize("alias_first", [True, False])
def test_an_alias_of_a_block_does_not_show_what_is_in_the_block(alias_first):
    layers = nn.ModuleList([Model(inner=nn.ModuleList(blocks(2))) for _ in range(3)])
    alias = {"first": layers[0]}
    model = Model(**alias, layers=layers) if alias_first else Model(layers=layers, **alias)
    assert list(shape(model)) == ["layers"]


def test_a_module_that_holds_its_model_does_not_send_the_search_in_circles():
    model = Model(layers=nn.ModuleList(blocks(3)))
    model.layers[0].parent = model
    assert list(shape(model)) == ["layers"]
    model.more = nn.ModuleList(blocks(3))
    model.more[0].parent = model
    assert list(shape(model)) == ["layers", "more"]


def test_children_without_tensors_are_not_blocks():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert shape(model) == {"": ["0", "2", "4"]}
    assert shape(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Identity(), nn.GELU())) == {}


def test_the_meta_device_is_searched_alike():
    with torch.device("meta"):
        assert list(shape(Model(embed=nn.Linear(8, 8), layers=nn.ModuleList(blocks(2))))) == ["layers"]


class TestGiven:
    """`towers=`."""

    def model(self) -> Model:
        return Model(embed=nn.Embedding(1000, 8), a=nn.ModuleList(blocks(2)), b=nn.Sequential(*blocks(3)), c=Block())

    def test_names_and_modules_of_lists_are_taken_whatever_their_size(self):
        model = self.model()
        assert shape(model) == {}
        assert shape(model, "a") == {"a": ["a.0", "a.1"]}
        assert shape(model, [model.b, "a"]) == {"b": ["b.0", "b.1", "b.2"], "a": ["a.0", "a.1"]}

    def test_a_list_of_blocks_is_a_tower(self):
        model = self.model()
        assert shape(model, [["c", model.a[1]], "b"]) == {"": ["c", "a.1"], "b": ["b.0", "b.1", "b.2"]}
        assert shape(model, [model.a[0], "a.1"]) == {"a": ["a.0", "a.1"]}
        assert shape(model, ["c"]) == {"c": ["c"]}

    def test_none_at_all_is_allowed(self):
        assert shape(self.model(), []) == {}

    @pytest.mark.parametrize(
        ("towers", "said"),
        [
            ("layers", "'layers', which is not a module"),
            ([nn.Linear(2, 2)], "a Linear, which is not a module"),
            (["a", "c"], "'c', a Block: not a list"),
            ([["a"]], "'a', a ModuleList, which has no forward"),
            (["a", ["a.0"]], "'a.0' in two towers"),
            ([3], "a int, which is not a module"),
        ],
    )
    def test_what_cannot_be_a_tower_is_named(self, towers, said):
        with pytest.raises(ModelError, match=said):
            find_towers(self.model(), towers)

    def test_a_tower_without_parameters_is_refused(self):
        with pytest.raises(ModelError, match="holds no parameters"):
            find_towers(Model(acts=nn.ModuleList([nn.ReLU(), nn.GELU()]), c=Block()), "acts")
