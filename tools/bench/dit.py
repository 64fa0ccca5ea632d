"""The model that is measured: a diffusion transformer of 24 blocks, 16.9 GB in bfloat16, with random weights.

Its blocks are those of video models: self-attention, cross-attention to a text of 512 tokens, and a feed-forward.
"""

import place
import torch
import torch.nn.functional as F
from torch import nn

TEXT = 512
SIZE = {"dim": 5120, "feed": 13824, "heads": 40}


class Attention(nn.Module):
    """Attention with separate q, k, v and output projections."""

    def __init__(self, dim, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.heads = heads

    def forward(self, x, context):
        """Attends from `x` to `context`."""
        q, k, v = self._split(self.q(x)), self._split(self.k(context)), self._split(self.v(context))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    def _split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, dim, feed, heads):
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.a, self.x = Attention(dim, heads), Attention(dim, heads)
        self.f1, self.f2 = nn.Linear(dim, feed), nn.Linear(feed, dim)

    def forward(self, x, context):
        """Transforms `x`."""
        h = self.n1(x)
        x = x + self.a(h, h)
        x = x + self.x(self.n2(x), context)
        return x + self.f2(F.gelu(self.f1(self.n3(x)), approximate="tanh"))


class DiT(nn.Module):
    """A list of blocks and nothing else."""

    def __init__(self, blocks, dim, feed, heads):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, feed, heads) for _ in range(blocks))

    def forward(self, x, context):
        """Runs all blocks."""
        for block in self.blocks:
            x = block(x, context)
        return x


def build(blocks=24, size=None):
    """The model in host memory; the GPU only makes the random numbers."""
    with torch.device("meta"):
        model = DiT(blocks, **(size or SIZE)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator(device=place.TENSORS).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=place.TENSORS)
            parameter.copy_(values.normal_(0, 0.01, generator=generator))
    torch.cuda.empty_cache()
    return model.eval().requires_grad_(False)


def on_gpu(model):
    """A copy of the model with all weights on the GPU; takes no host memory."""
    first = model.blocks[0]
    feed, dim = first.f1.weight.shape
    with torch.device("meta"):
        twin = DiT(len(model.blocks), dim, feed, first.a.heads).to(torch.bfloat16)
    twin.to_empty(device=place.TENSORS)
    with torch.no_grad():
        for target, source in zip(twin.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    return twin.eval().requires_grad_(False)


def inputs(seq, size=None):
    """Hidden states and text for one call, the same in every process."""
    dim = (size or SIZE)["dim"]
    generator = torch.Generator(device=place.TENSORS).manual_seed(seq)
    make = {"device": place.TENSORS, "dtype": torch.bfloat16, "generator": generator}
    return [torch.randn(1, n, dim, **make) * 0.5 for n in (seq, TEXT)]


def weight_bytes(model):
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())
