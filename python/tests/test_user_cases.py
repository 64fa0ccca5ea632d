"""Models that users brought to other offloaders and that failed there."""

from __future__ import annotations

import pytest
import torch
from attach_models import DIM, MlpBlock, Towered, assert_same_state, attached, host, inputs, run, same_bits, snapshot
from torch import nn
from torch.nn import functional as F

import weightstream


class FreeParameters(nn.Module):
    """Parameters used by hand, layers beside the block list, and modules in a plain list."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.scale1 = nn.Parameter(torch.randn(16))
            self.scale2 = nn.Parameter(torch.randn(16))
            self.wide = nn.Linear(16, 512)
            self.narrow = nn.Linear(512, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x) * self.scale1 + self.scale2
            return self.narrow(F.relu(F.linear(x, self.wide.weight, self.wide.bias)))

    class Activation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.rand(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.sin(self.alpha * x)

    def __init__(self) -> None:
        super().__init__()
        self.register_tokens = nn.Parameter(torch.randn(1, 4, 16))
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])
        self.caption_projection = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.post_quant_conv = nn.Conv2d(1, 2, 3, padding=1)
        self.activation = self.Activation()
        self.plain = [nn.Linear(16, 16)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.register_tokens.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.caption_projection[1](self.caption_projection[0](x))
        for block in self.blocks:
            x = self.activation(block(x))
        return self.plain[0](self.post_quant_conv(x[:, None]))


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_free_parameters_and_layers_outside_the_list(order: str) -> None:
    torch.manual_seed(0)
    model = FreeParameters()
    x = torch.randn(2, 3, 16)
    expected = run(model, x)
    with attached(model, 0.8, device=host(order)) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        report = attachment.report()
        assert report["towers"] == {"blocks": 3}
        assert report["unregistered"] == ["plain[0]"]
        assert any("plain[0]" in note for note in report["notes"])
        engine = report["engine"]
        block = max(unit["bytes"] for unit in engine["units"])
        assert engine["page_bytes_peak"] <= report["base_bytes"] + 2 * 2 * block + 8 * engine["page_bytes"]


class Shared(nn.Module):
    """A head that is the embedding, blocks that share a weight, a buffer and each other, and a view of a parameter."""

    class Block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.lin = nn.Linear(dim, dim)
            self.own = nn.Linear(dim, 8 * dim)
            self.back = nn.Linear(8 * dim, dim)
            self.register_buffer("shift", torch.randn(dim))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) + self.back(torch.tanh(self.own(x))) + self.shift

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, dim)
        self.blocks = nn.ModuleList([self.Block(dim) for _ in range(4)])
        self.blocks.append(self.blocks[1])
        self.blocks[2].lin.weight = self.blocks[0].lin.weight
        self.blocks[2].shift = self.blocks[1].shift
        self.first_rows = nn.Parameter(self.blocks[3].own.weight.detach()[: 4 * dim])
        self.head = nn.Linear(dim, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + F.linear(x, self.first_rows).sum(-1, keepdim=True)


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("look_ahead", [None, 0, 1])
def test_one_parameter_in_several_places(order: str, look_ahead: int | None) -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    ids = torch.arange(12).view(2, 6)
    expected = run(model, ids)
    before = snapshot(model)
    distinct = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}
    total = sum(p.nbytes for p in {id(p): p for p in (*model.parameters(), *model.buffers())}.values())
    with attached(model, 0.8, device=host(order), look_ahead=look_ahead) as attachment:
        assert attachment.report()["model_bytes"] == total - model.first_rows.nbytes
        assert model.first_rows.data_ptr() == model.blocks[3].own.weight.data_ptr()
        for _ in range(3):
            assert same_bits(run(model, ids), expected)
        assert_same_state(model, before)
    assert model.head.weight is model.emb.weight
    assert model.blocks[2].lin.weight is model.blocks[0].lin.weight
    assert model.blocks[2].shift is model.blocks[1].shift
    assert model.first_rows.data_ptr() == model.blocks[3].own.weight.data_ptr()
    assert len(distinct) == len({p.data_ptr() for p in (*model.parameters(), *model.buffers())})
    assert_same_state(model, before)


class Normed(nn.Module):
    """A norm with weights before each tracked layer, one that keeps statistics in buffers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_proj = nn.Linear(8, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.RMSNorm(dim)) for _ in range(4)
        )
        self.layers[2].append(nn.BatchNorm1d(dim))
        self.norm = nn.LayerNorm(dim)
        self.output_proj = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x)
        return self.output_proj(self.norm(x))


@pytest.mark.parametrize(
    ("dim", "batch", "bandwidth"),
    [(512, 2, 400_000_000), (64, 2048, None)],
    ids=["copies slower than the compute", "compute slower than the copies"],
)
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_twenty_passes_from_the_first_on(dim: int, batch: int, bandwidth: int | None, order: str) -> None:
    torch.manual_seed(0)
    model = Normed(dim).train()
    with torch.no_grad():
        model(torch.randn(16, 8))
    state = snapshot(model)
    x = torch.randn(batch, 8)
    expected = [run(model, x) for _ in range(20)]
    after = snapshot(model)
    model.load_state_dict(state)
    with attached(model, 0.8, device=host(order, bandwidth=bandwidth)) as attachment:
        for want in expected:
            assert same_bits(run(model, x), want)
        assert attachment.stats()["copies"] > 40
        assert_same_state(model, after)
    assert_same_state(model, after)


def test_torch_layers_with_fused_paths() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, DIM)
    expected = run(model, x)
    with attached(model, 0.6) as attachment:
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0


def test_a_weight_read_outside_its_blocks_forward() -> None:
    class Peeking(Towered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.blocks[0].up.weight.sum() + self.blocks[3].down.bias[0]

    torch.manual_seed(0)
    model = Peeking([MlpBlock() for _ in range(4)])
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.7) as attachment:
        for _ in range(4):
            assert same_bits(run(model, x), expected)
        assert any("blocks.0.up.weight" in note for note in attachment.report()["notes"])
        assert attachment.stats()["copies"] > 0


def test_adapters_added_after_attach_drop_the_segments() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2 + F.linear(x, self.inner.weight)

    torch.manual_seed(0)
    model = Towered([MlpBlock() for _ in range(5)])
    x = inputs()
    before = run(model, x)
    with attached(model, 0.6) as attachment:
        run(model, x)
        assert set(attachment.report()["segments"].values()) == {2}
        plain = model.blocks[1].up
        model.blocks[1].up = Adapted(plain)
        adapted = run(model, x)
        assert not same_bits(adapted, before)
        for _ in range(3):
            assert same_bits(run(model, x), adapted)
        model.blocks[1].up = plain
        for _ in range(3):
            assert same_bits(run(model, x), before)
    reference = Towered([MlpBlock() for _ in range(5)])
    reference.load_state_dict(model.state_dict())
    reference.blocks[1].up = Adapted(reference.blocks[1].up)
    assert same_bits(run(reference, x), adapted)


def test_towers_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
            self.second = nn.ModuleList([MlpBlock() for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.first, *self.second):
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Two()
    x = torch.randn(3, 64)
    expected = run(model, x)
    for towers, names in [(None, ["first", "second"]), ("second", ["second"]), ([model.first], ["first"])]:
        with weightstream.attach(model, device=host(), budget="800KiB", towers=towers) as attachment:
            assert list(attachment.report()["towers"]) == names
            for _ in range(3):
                assert same_bits(run(model, x), expected)


@pytest.mark.parametrize("calls_the_old_one", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("where", ["block", "part of a block", "root"])
def test_forwards_that_are_replaced_after_attach(calls_the_old_one: bool, steps: int, where: str) -> None:
    torch.manual_seed(0)
    model = Towered([MlpBlock() for _ in range(5)])
    x = inputs()
    expected = run(model, x)
    with attached(model, 0.5) as attachment:
        for _ in range(steps):
            assert same_bits(run(model, x), expected)
        module = {"block": model.blocks[2], "part of a block": model.blocks[2].up, "root": model}[where]
        old = module.forward
        plain = type(module).forward.__get__(module)
        module.forward = (lambda *args: old(*args)) if calls_the_old_one else (lambda *args: plain(*args))
        for _ in range(3):
            assert same_bits(run(model, x), expected)
        assert attachment.stats()["copies"] > 0
    assert same_bits(run(model, x), expected)
    del module.forward
    assert same_bits(run(model, x), expected)
    assert "forward" not in vars(model.blocks[2]) and "forward" not in vars(model.blocks[1])
