"""Models whose one graph is harder to keep in order, and helpers that run them resident and streamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attach_models import DIM, AttentionBlock, MlpBlock, Towered, mlp, run
from torch import nn
from torch.nn import functional as F


ONE_GRAPH = [
    pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="one graph is offered with PyTorch 2.11 only"),
    pytest.mark.usefixtures("fresh_compiler"),
]
"""Marks of tests of one graph."""


def fresh() -> None:
    """A compiler that knows nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many graphs the compiler made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def stored(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class Tied(Towered):
    """Blocks that share a layer, one object, with one another, and a base whose parameter shares bytes with theirs."""

    def __init__(self) -> None:
        super().__init__([MlpBlock() for _ in range(5)])
        self.blocks[3].up = self.blocks[0].up
        self.blocks[4].down.weight = self.blocks[2].down.weight
        self.table = nn.Parameter(self.blocks[1].up.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table.sum()


class TwoViews(Towered):
    """A block with two parameters that show the same bytes."""

    def __init__(self) -> None:
        super().__init__([MlpBlock() for _ in range(4)])
        for block in self.blocks:
            block.turned = nn.Parameter(block.up.weight.data.t())
            block.forward = lambda x, block=block: MlpBlock.forward(block, x) + (x @ block.turned)[..., :DIM]


class Twice(Towered):
    """Every block runs two times, once right after itself and once in a second round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class Scaled(nn.Module):
    """A block whose weights are read by pointwise kernels only, which a compiler fuses with what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(64, DIM))
        self.shift = nn.Parameter(torch.randn(64, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[-2]
        return x * self.gain[:rows] + self.shift[:rows] * 0.1


class Skipping(Towered):
    """A U: what blocks of the way down gave is kept, and read at the end of the way up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[half:]:
            x = block(x + kept.pop())
        return self.head(x)


class Viewing(Scaled):
    """The same, whose result is a view of what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).transpose(-1, -2).flip(-1).transpose(-1, -2)


class Late(Towered):
    """The blocks do not depend on each other, and what they gave is needed at the very end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        given = [block(x) for block in self.blocks]
        y = x
        for _ in range(4):
            y = torch.tanh(y @ torch.ones(DIM, DIM))
        for z in given:
            y = y + z
        return self.head(y)


class Caching(nn.Module):
    """A block that writes into a buffer it is given, and gives a tuple and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.key = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM)

    def forward(self, state: dict, *, cache: torch.Tensor, log: list) -> tuple:
        x = self.norm(state["x"])
        cache.copy_(self.key(x))
        log.append(self.value(x))
        return {"x": x + self.value(x)}, (self.key(x),)


class Cached(Towered):
    """Blocks beside whose results there are caches and a list."""

    def __init__(self) -> None:
        super().__init__([Caching() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, log = {"x": self.stem(x)}, []
        caches = [torch.zeros_like(state["x"]) for _ in self.blocks]
        for block, cache in zip(self.blocks, caches):
            state, (key,) = block(state, cache=cache, log=log)
            state["x"] = state["x"] + key
        return self.head(state["x"] + sum(caches) + sum(log))


class Alone(Towered):
    """Layers of blocks are called outside their block's forward, once that is asked for."""

    out_of_turn = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.out_of_turn:
            x = self.blocks[2].norm(x)
        for block in self.blocks:
            x = block(x)
        if self.out_of_turn:
            x = x + self.blocks[1].down(F.relu(self.blocks[1].up(x)))
        return self.head(x)


class Hiding(MlpBlock):
    """A block that keeps what it computed where nobody sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.up(self.norm(x))
        return super().forward(x)


class Revealing(Towered):
    """Reads what the blocks keep, at the end."""

    def __init__(self, block: type[nn.Module] = Hiding) -> None:
        super().__init__([block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + sum(block.hidden.sum() for block in self.blocks)


class HidingProduct(Scaled):
    """The same, of a pointwise product, which a compiler computes where it is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x * self.gain[: x.shape[-2]]
        return super().forward(x).transpose(-1, -2).contiguous().transpose(-1, -2)


class Indexing(MlpBlock):
    """A block that looks rows up, which fails for numbers it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, DIM)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rows(index)


class Indexed(Towered):
    """Blocks that take an index."""

    def __init__(self) -> None:
        super().__init__([Indexing() for _ in range(4)])

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, index)
        return self.head(x)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model at each call."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return made


MODELS = {
    "mlp": mlp,
    "tied": seeded(Tied),
    "two_views": seeded(TwoViews),
    "twice": seeded(lambda: Twice([MlpBlock() for _ in range(3)])),
    "unlike": seeded(lambda: Towered([MlpBlock(), AttentionBlock(), MlpBlock(width=2), Scaled(), AttentionBlock()])),
    "scaled": seeded(lambda: Towered([Scaled() for _ in range(6)])),
    "skipping": seeded(lambda: Skipping([MlpBlock() for _ in range(6)])),
    "late": seeded(lambda: Late([Scaled() for _ in range(4)])),
    "late_views": seeded(lambda: Late([Viewing() for _ in range(4)])),
    "late_mlp": seeded(lambda: Late([MlpBlock() for _ in range(4)])),
    "cached": seeded(Cached),
}


def compiled_resident(make: Callable[[], nn.Module], backend: str, *inputs: torch.Tensor) -> torch.Tensor:
    """What a resident model gives that is compiled as one graph, whose parameters require no grad."""
    model = make().requires_grad_(False)
    if backend == "eager":
        return run(model, *inputs)
    return run(torch.compile(model, fullgraph=True, backend=backend), *inputs)
