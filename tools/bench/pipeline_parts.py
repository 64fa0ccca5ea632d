"""The pipeline that is measured: a text encoder of 5 GB, a diffusion transformer of 13 and a decoder of 1, with random weights."""

import dit
import place
import torch
import torch.nn.functional as F
from torch import nn

# Blocks and widths: 16 blocks of 302 MB, 19 of 703 and 17 of 59, in bfloat16.
FULL = {
    "encoder": {"blocks": 16, "dim": 4096, "feed": 10240, "heads": 32},
    "transformer": {"blocks": 19, **dit.SIZE},
    "vae": {"blocks": 17, "channels": 1280},
    "text": 512,
    "side": 16,
}


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward."""

    def __init__(self, dim, feed, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = dit.Attention(dim, heads)
        self.f1, self.f2 = nn.Linear(dim, feed), nn.Linear(feed, dim)

    def forward(self, x):
        """Transforms `x`."""
        h = self.n1(x)
        x = x + self.attention(h, h)
        return x + self.f2(F.gelu(self.f1(self.n2(x)), approximate="tanh"))


class Encoder(nn.Module):
    """Embedded words to what the transformer looks at."""

    def __init__(self, blocks, dim, feed, heads, out):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(dim, feed, heads) for _ in range(blocks))
        self.out = nn.Linear(dim, out)

    def forward(self, x):
        """Runs all blocks."""
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        """Transforms `x`."""
        return x + self.second(F.silu(self.first(F.silu(self.norm(x)))))


class Decoder(nn.Module):
    """A VAE's half that makes images; pipelines call its `decode` and not its forward."""

    def __init__(self, blocks, channels, latent):
        super().__init__()
        self.inward = nn.Conv2d(latent, channels, 1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.out = nn.Conv2d(channels, 3, 3, padding=1)

    def decode(self, latents):
        """Latents to an image."""
        x = self.inward(latents)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    forward = decode


class Pipeline:
    """Text, then steps with and without it, then an image."""

    def __init__(self, components, sizes):
        self.components = components
        self.sizes = sizes

    def encode(self, seed):
        """What the words mean."""
        dim, words = self.sizes["encoder"]["dim"], self.sizes["text"]
        return self.components["text_encoder"](noise((1, words, dim), seed))

    def step(self, x, context):
        """One step."""
        return x + 0.1 * self.components["transformer"](x, context)

    def start(self, seed, seq):
        """What the first step starts from."""
        return noise((1, seq, self.sizes["transformer"]["dim"]), seed + 1)

    def decode(self, x):
        """The image."""
        side, latent = self.sizes["side"], self.components["vae"].inward.in_channels
        return self.components["vae"].decode(x.flatten()[: latent * side * side].view(1, latent, side, side))

    def __call__(self, seed, seq, steps):
        """A generation."""
        context = self.encode(seed)
        x = self.start(seed, seq)
        for _ in range(steps):
            x = self.step(x, context)
        return self.decode(x)


def noise(shape, seed):
    """The same in every process."""
    generator = torch.Generator(device=place.TENSORS).manual_seed(seed)
    return torch.randn(shape, device=place.TENSORS, dtype=torch.bfloat16, generator=generator) * 0.5


def build(sizes):
    """The pipeline in host memory; the GPU only makes the random numbers."""
    dim = sizes["transformer"]["dim"]
    with torch.device("meta"):
        models = {
            "text_encoder": Encoder(out=dim, **sizes["encoder"]),
            "transformer": dit.DiT(**sizes["transformer"]),
            "vae": Decoder(latent=16, **sizes["vae"]),
        }
    generator = torch.Generator(device=place.TENSORS).manual_seed(0)
    for model in models.values():
        model.to(torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=place.TENSORS)
                parameter.copy_(values.normal_(0, 0.01, generator=generator))
        model.eval().requires_grad_(False)
    torch.cuda.empty_cache()
    return Pipeline(models, sizes)


def resident(pipeline):
    """A copy with all weights on the GPU; takes no host memory."""
    twins = {}
    for name, model in pipeline.components.items():
        with torch.device("meta"):
            twin = empty_like(model)
        twin.to(torch.bfloat16).to_empty(device=place.TENSORS)
        with torch.no_grad():
            for target, source in zip(twin.parameters(), model.parameters(), strict=True):
                target.copy_(source)
        twins[name] = twin.eval().requires_grad_(False)
    return Pipeline(twins, pipeline.sizes)


def empty_like(model):
    """A model of the same shape."""
    first = model.blocks[0]
    if isinstance(model, Encoder):
        feed, dim = first.f1.weight.shape
        return Encoder(len(model.blocks), dim, feed, first.attention.heads, model.out.out_features)
    if isinstance(model, Decoder):
        return Decoder(len(model.blocks), first.first.in_channels, model.inward.in_channels)
    feed, dim = first.f1.weight.shape
    return dit.DiT(len(model.blocks), dim, feed, first.a.heads)
