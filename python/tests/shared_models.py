"""Models that share weights in every way that models of a pipeline do, what they should be, and the device memory they hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_models import Fuse, Model
from torch import Tensor, nn

WIDTH = 64
Models = dict[str, nn.Module]


class Guided(nn.Module):
    """A model that reads a text with an encoder of its own, which others may have too."""

    def __init__(self, encoder: nn.Module, blocks: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.encoder = encoder
        self.body = Model(width, blocks)

    def forward(self, x: Tensor) -> Tensor:
        # It reads a weight of the encoder's by itself, too.
        return self.body(x + self.encoder(x) * self.encoder.first.bias)


class Mixed(nn.Module):
    """A block with a whole model in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.up(x))


class Deep(nn.Module):
    """Blocks that have models in them."""

    def __init__(self, inner: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed(one) for one in inner)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def apart() -> Models:
    """Two models that share nothing yet."""
    return {"transformer": Model(WIDTH, 6), "text_encoder": Model(WIDTH, 5)}


def layer() -> tuple[Models, str]:
    """One layer outside blocks, the same module in both."""
    models = apart()
    models["text_encoder"].first = models["transformer"].first
    return models, "first"


def parameter() -> tuple[Models, str]:
    """One parameter in two modules, whose biases are their own."""
    models = apart()
    models["text_encoder"].last.weight = models["transformer"].first.weight
    return models, "last"


def storage() -> tuple[Models, str]:
    """Two parameters over the same bytes, as a load from one file gives them, one of them a part of the other."""
    models = apart()
    whole = models["transformer"].blocks[2].up.weight
    models["text_encoder"].first.weight = nn.Parameter(whole.data[:WIDTH])
    return models, "first"


def blocks_of_both() -> tuple[Models, str]:
    """Weights of blocks, by other modules."""
    models = apart()
    for one, other in zip(models["transformer"].blocks[:3], models["text_encoder"].blocks):
        other.up.weight, other.up.bias = one.up.weight, one.up.bias
    return models, "blocks"


def layers_in_blocks() -> tuple[Models, str]:
    """Layers of blocks, the same modules in both."""
    models = apart()
    for one, other in zip(models["transformer"].blocks[1:], models["text_encoder"].blocks):
        other.down = one.down
    return models, "blocks"


def models_in_blocks() -> tuple[Models, str]:
    """Models with blocks of their own, in the blocks of both."""
    inner = [Model(WIDTH, 3) for _ in range(3)]
    return {"transformer": Deep(inner), "text_encoder": Deep(inner[::-1])}, "blocks"


def list_of_blocks() -> tuple[Models, str]:
    """A whole list of blocks."""
    models = {"transformer": Model(WIDTH, 6), "text_encoder": Model(WIDTH, 2)}
    models["text_encoder"].blocks = models["transformer"].blocks
    return models, "blocks"


def some_blocks() -> tuple[Models, str]:
    """Some blocks of each list."""
    models = apart()
    for number in (1, 3):
        models["text_encoder"].blocks[number] = models["transformer"].blocks[number + 1]
    return models, "blocks"


def encoder_of_two() -> tuple[Models, str]:
    """A text encoder that two models have."""
    encoder = Model(WIDTH, 6)
    return {"prior": Guided(encoder), "decoder": Guided(encoder)}, "encoder"


def encoder_of_three() -> tuple[Models, str]:
    """A text encoder that three models have, two of which share something else."""
    encoder = Model(WIDTH, 6)
    models = {"prior": Guided(encoder), "decoder": Guided(encoder), "refiner": Guided(encoder)}
    models["refiner"].body.last = models["prior"].body.last
    return models, "encoder"


def model_in_another() -> tuple[Models, str]:
    """A model of the pipeline that lies in another."""
    encoder = Model(WIDTH, 6)
    return {"transformer": Guided(encoder), "text_encoder": encoder}, "encoder"


def models_in_each_other() -> tuple[Models, str]:
    """A model in one that lies in a third."""
    encoder = Model(WIDTH, 6)
    inner = Guided(encoder)
    return {"text_encoder": encoder, "prior": inner, "transformer": Guided(inner.encoder)}, "encoder"


CASES = [
    layer, parameter, storage, blocks_of_both, layers_in_blocks, models_in_blocks, list_of_blocks, some_blocks, encoder_of_two, encoder_of_three,
    model_in_another, models_in_each_other,
]  # fmt: skip


def made(build: Callable[[], tuple[Models, str]]) -> tuple[Models, Models, Tensor]:
    """Models, what they should be with weights of bfloat16, and an input. What is shared is so in both."""
    torch.manual_seed(11)
    models, _ = build()
    for model in models.values():
        model.eval()
    references = copy.deepcopy(models)
    for model in references.values():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.bfloat16()
    return models, references, torch.randn(2, WIDTH).bfloat16()


@torch.no_grad()
def check(models: Models, references: Models, x: Tensor, *names: str) -> None:
    for name in names or models:
        assert torch.equal(models[name](x), references[name](x)), name


def fail_somewhere(models: Models, references: Models, x: Tensor, draw: random.Random) -> None:
    """Runs all of them with an error at a random place, and tells the references what this left in buffers."""
    Fuse.calls, Fuse.at = 0, draw.randint(1, 9)
    Fuse.error = draw.choice([ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
    try:
        with pytest.raises(Fuse.error), torch.no_grad():
            for model in models.values():
                model(x)
    finally:
        Fuse.at = None
    for name, model in models.items():
        for mine, theirs in zip(references[name].buffers(), model.buffers()):
            mine.copy_(theirs)


def held(managed: Any) -> int:
    """Device memory that holds weights now."""
    everything = (*managed.models.values(), *managed.shared.values())
    return sum({id(one.group): one.group.report()["page_bytes_in_use"] for one in everything}.values())


def peak(managed: Any) -> int:
    everything = (*managed.models.values(), *managed.shared.values())
    return sum({id(one.group): one.group.report()["page_bytes_peak"] for one in everything}.values())
