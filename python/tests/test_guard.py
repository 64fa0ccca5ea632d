"""Looking at a parameter of an attached model outside its turn gives its own bytes; writing to one is refused."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from attach_models import MlpBlock, Towered, attached, inputs, mlp, run, same_bits
from torch import nn

from weightstream import StateError
from weightstream.compiled import COMPILES
from weightstream.guard import ManagedParameter, ParameterGuard


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
        assert not same_bits(other + 0, true) or not same_bits(weight + 0, weight.cpu()), "one of them must be absent"
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
    "detach": lambda p: p.detach(),
    "detach, cpu": lambda p: p.detach().cpu(),
    "detach, numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "data": lambda p: p.data,
    "data, clone": lambda p: p.data.clone(),
    "slice": lambda p: p[:].clone(),
    "index": lambda p: torch.stack([p[number] for number in range(len(p))]),
    "iteration": lambda p: torch.stack(list(p)),
    "reversed": lambda p: reversed(p).flip(0),
    "view": lambda p: p.view(-1).view(p.shape),
    "view of a dtype": lambda p: p.view(torch.int32).view(torch.float32),
    "reshape": lambda p: p.reshape(-1).reshape(p.shape),
    "contiguous": lambda p: p.contiguous(),
    "t": lambda p: p.t().t(),
    "T": lambda p: p.T.T,
    "mT": lambda p: p.mT.mT,
    "transpose": lambda p: p.transpose(0, 1).t(),
    "chunk": lambda p: torch.cat(p.chunk(3)),
    "unsqueeze": lambda p: p.unsqueeze(0).squeeze(0),
    "as_strided": lambda p: p.as_strided(p.shape, p.stride()),
    "flip": lambda p: p.flip(0).flip(0),
    "minus": lambda p: -(-p),
    "mul": lambda p: p.mul(1),
    "dlpack": lambda p: torch.from_dlpack(p),
    "saved data": lambda p: _saved([p.data])[0],
    "saved views": lambda p: _saved([p[:2], p[2:]], torch.cat),
}


def _saved(tensors: list[torch.Tensor], join=lambda tensors: tensors):  # noqa: ANN001, ANN202
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return join(torch.load(file, weights_only=True))


@pytest.mark.parametrize("way", READS)
def test_reads_give_the_true_bytes(streamed, way: str) -> None:
    _, weight, true = streamed
    assert same_bits(READS[way](weight), true)


def test_a_read_gives_a_copy_that_may_be_written(streamed) -> None:
    model, weight, true = streamed
    expected = run(model, inputs())
    weight.cpu().zero_()
    weight.numpy()[:] = 0
    weight.data.zero_()
    weight.detach()[:] = 0
    weight[0].fill_(3)
    assert same_bits(weight.cpu(), true)
    assert same_bits(run(model, inputs()), expected)


def test_reductions_and_whole_models_are_read_right() -> None:
    model = mlp()
    plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with attached(model, 0.4):
        for _ in range(2):
            run(model, inputs())
            for name, parameter in model.named_parameters():
                assert same_bits(parameter.data, plain[name]), name
                assert same_bits(parameter.sum(), plain[name].sum()), name
                assert same_bits(parameter.abs().max(), plain[name].abs().max()), name
                assert parameter.isnan().any().item() is False
                assert parameter.equal(plain[name])
            vector = nn.utils.parameters_to_vector(model.parameters())
            assert same_bits(vector, torch.cat([value.view(-1) for value in plain.values()]))


def test_a_second_thread_reads_the_host_while_the_first_is_in_a_turn() -> None:
    class Asking(MlpBlock):
        ask = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.ask is not None:
                self.ask(self.up.weight)
            return super().forward(x)

    torch.manual_seed(0)
    model = Towered([Asking() for _ in range(5)])
    seen: list[tuple[int, int]] = []

    def ask(weight: nn.Parameter) -> None:
        here = weight.detach().data_ptr()
        with ThreadPoolExecutor(1) as pool:
            seen.append((here == weight.data_ptr(), pool.submit(lambda: weight.cpu().data_ptr()).result() == here))

    with attached(model):
        for block in model.blocks:
            block.ask = ask
        run(model, inputs())
    assert seen == [(True, False)] * 5


class Viewing(nn.Module):
    """Reads its weights through views and conversions of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        x = x @ weight.t() + bias.view(1, 1, -1)
        x = x @ weight.data + bias.unsqueeze(0).data
        x = x @ weight.detach().T + weight[0] - weight.T[1]
        x = x @ torch.cat(weight.chunk(4)).mT + bias.reshape(1, 64).expand(2, 5, 64)[:, :1]
        return torch.tanh(x + -bias * weight.sum() + torch.stack(list(weight))[2] + bias.real)


@pytest.mark.parametrize("compiled", [False, True])
def test_views_in_the_forward_are_the_device_s(compiled: bool) -> None:
    torch.manual_seed(0)
    model = Towered([Viewing() for _ in range(5)])
    x = inputs()
    expected = run(model, x)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    with attached(model, 0.6):
        called = torch.compile(model, backend=backend) if compiled else model
        for _ in range(4):
            assert same_bits(run(called, x), expected)
    if compiled and COMPILES:
        assert len(graphs) <= 3 and max(graphs) > 25, "views must not cut a block's graph"


def test_setting_data_is_refused(streamed) -> None:
    model, weight, true = streamed
    expected = run(model, inputs())
    with pytest.raises(StateError, match=r"data on the managed parameter blocks\.5\.up\.weight"):
        weight.data = torch.zeros_like(true)
    assert same_bits(run(model, inputs()), expected)


def test_a_state_dict_copies_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    with attached(model, 0.4):
        run(model, inputs())
        monkeypatch.setattr(ParameterGuard, "copy", lambda self: pytest.fail(f"{self.name} was copied"))
        assert len(model.state_dict()) == len(list(model.parameters()))
        model.state_dict(keep_vars=True)


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
