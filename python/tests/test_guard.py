"""Looking at a parameter of an attached model outside its turn gives its own bytes; writing to one is refused."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch
from attach_models import Towered, attached, inputs, mlp, run, same_bits
from torch import nn

from weightstream import StateError
from weightstream.guard import ManagedParameter


@pytest.fixture
def streamed():
    """A model that streams, one of its weights that is absent, and that weight's true value."""
    model = mlp()
    true = model.blocks[5].up.weight.detach().clone()
    with attached(model, 0.4):
        run(model, inputs())
        run(model, inputs())
        weight = model.blocks[1].up.weight
        other = model.blocks[5].up.weight
        assert not same_bits(other.data, true) or not same_bits(weight.data, weight.cpu()), "one of them must be absent"
        yield model, other, true


READS = {
    "cpu": lambda p: p.cpu(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to("cpu"),
    "to dtype": lambda p: p.to(torch.float64).float(),
    "double": lambda p: p.double().float(),
    "numpy": lambda p: torch.from_numpy(p.numpy()),
    "array": lambda p: torch.from_numpy(numpy.array(p)),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "deepcopy": lambda p: copy.deepcopy(p).detach(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
}


@pytest.mark.parametrize("way", READS)
def test_reads_give_the_true_bytes(streamed, way: str) -> None:
    _, weight, true = streamed
    assert same_bits(READS[way](weight), true)


def test_a_read_gives_a_copy_that_may_be_written(streamed) -> None:
    _, weight, true = streamed
    weight.cpu().zero_()
    weight.numpy()[:] = 0
    assert same_bits(weight.cpu(), true)


def test_torch_save_of_a_parameter_writes_its_own_bytes_only(streamed) -> None:
    _, weight, true = streamed
    file = io.BytesIO()
    torch.save(weight, file)
    assert file.tell() < true.nbytes + 4096
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same_bits(loaded.detach(), true) and type(loaded) is nn.Parameter and loaded.requires_grad


def test_printing_shows_the_true_values(streamed) -> None:
    _, weight, true = streamed
    text = repr(weight)
    assert "blocks.5.up.weight" in text and repr(true[0, 0].item())[:5] in text
    assert str(weight) == text


def test_a_deep_copied_parameter_is_plain_and_keeps_its_settings(streamed) -> None:
    _, weight, _ = streamed
    copied = copy.deepcopy(weight)
    assert type(copied) is nn.Parameter and copied.requires_grad and copied.device.type == "cpu"
    twins = copy.deepcopy([weight, weight])
    assert twins[0] is twins[1]


WRITES = {
    "copy_": lambda p: p.copy_(torch.zeros_like(p)),
    "zero_": lambda p: p.zero_(),
    "add_": lambda p: p.add_(1),
    "init": lambda p: nn.init.normal_(p),
    "+=": lambda p: p.__iadd__(1),
    "setitem": lambda p: p.__setitem__(0, 0),
    "requires_grad_": lambda p: p.requires_grad_(),
}


@pytest.mark.parametrize("way", WRITES)
def test_writes_are_refused_by_name(streamed, way: str) -> None:
    _, weight, true = streamed
    with torch.no_grad(), pytest.raises(StateError, match=r"blocks\.5\.up\.weight"):
        WRITES[way](weight)
    assert same_bits(weight.cpu(), true)


def test_conversions_in_the_forward_use_the_device() -> None:
    seen = []

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(128, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.to(torch.float32).data_ptr() == self.weight.data_ptr())
            return x + (x @ self.weight.double().t() @ self.weight.clone().double()).float()

    class Doubled(Towered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x).double()
            for block in self.blocks:
                x = block(x)
            return self.head(x.float())

    torch.manual_seed(0)
    model = Doubled([Casting() for _ in range(5)])
    expected = run(model, inputs())
    with attached(model, 0.6):
        seen.clear()
        for _ in range(3):
            assert same_bits(run(model, inputs()), expected)
        assert seen and all(seen)


def test_the_class_costs_no_dispatch_and_is_undone() -> None:
    assert ManagedParameter.__torch_function__ is nn.Parameter.__torch_function__
    model = mlp()
    with attached(model):
        assert all(isinstance(p, nn.Parameter) and type(p) is ManagedParameter for p in model.parameters())
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())


def test_parameter_classes_of_others_keep_what_they_add() -> None:
    class Tagged(nn.Parameter):
        def tag(self) -> str:
            return "tagged"

    model = mlp()
    model.blocks[0].up.weight = Tagged(model.blocks[0].up.weight.detach())
    expected = run(model, inputs())
    with attached(model):
        weight = model.blocks[0].up.weight
        assert isinstance(weight, ManagedParameter) and weight.tag() == "tagged"
        assert same_bits(run(model, inputs()), expected)
    assert type(model.blocks[0].up.weight) is Tagged
