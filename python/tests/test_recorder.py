"""The recorder: which reads it sees, where it anchors them, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from planning_replay import record
from recorder_models import DEVICES, SEQUENCE, WIDTH, X, linear, model_of
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weightstream.errors import ForwardError
from weightstream.ownership import collect
from weightstream.recorder import Recorder
from weightstream.towers import find_towers


def anchors(model: nn.Module, x: torch.Tensor) -> dict[str, set[str]]:
    """Names of the modules in whose calls each tensor of the first block is read."""
    names = {id(module): name for name, module in model.layers[0].named_modules()}
    ownership, trace, _ = record(model, lambda: model(x))
    assert trace.complete and not trace.stray
    found: dict[str, set[str]] = {}
    for read in trace.visits[0].reads:
        name = ownership.tensors[read.tensor].name.removeprefix("layers.0.")
        found.setdefault(name, set()).add(names[id(read.call.module)])
    return found


def test_a_child_that_is_called_anchors_its_own_weight():
    model = model_of(lambda self, x: self.b(self.a(x)), a=linear, b=lambda: nn.Linear(WIDTH, WIDTH))
    assert anchors(model, X) == {"a.weight": {"a"}, "b.weight": {"b"}, "b.bias": {"b"}}


def test_a_direct_call_of_forward_is_seen_too():
    assert anchors(model_of(lambda self, x: self.a.forward(x), a=linear), X) == {"a.weight": {"a"}}


def test_a_weight_read_by_the_parent_is_anchored_at_the_parent():
    assert anchors(model_of(lambda self, x: F.linear(x, self.a.weight), a=linear), X) == {"a.weight": {""}}


def test_weights_put_together_by_the_parent_are_anchored_at_the_parent():
    def run(self, x):
        return self.out(F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight])).chunk(3, -1)[0])

    found = anchors(model_of(run, q=linear, k=linear, v=linear, out=linear), X)
    assert found == {"q.weight": {""}, "k.weight": {""}, "v.weight": {""}, "out.weight": {"out"}}


def test_making_a_view_is_no_read_and_reading_through_one_is():
    def views(self, x):
        weight = self.a.weight
        torch.ops.aten._unsafe_view(weight.detach(), [WIDTH * WIDTH])
        weight.t().view(WIDTH, 4, -1)[2:].expand(WIDTH - 2, 4, 4).chunk(2), torch.empty_like(weight)
        return x

    assert anchors(model_of(views, a=linear), X) == {}
    through = model_of(lambda self, x: x + self.a.weight.t()[3].view(4, 4)[1:2].sum(), a=linear)
    assert anchors(through, X) == {"a.weight": {""}}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_one_anchor(need_weights, mode):
    model = model_of(
        lambda self, x: self.out(self.attention(x, x, x, need_weights=need_weights)[0]),
        attention=lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), out=linear,
    )  # fmt: skip
    with mode():
        found = anchors(model, SEQUENCE)
    attention = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    assert found == {**{f"attention.{name}": {"attention"} for name in attention}, "out.weight": {"out"}}


def operators(trace) -> set[str]:
    return {read.operator for visit in trace.visits for read in visit.reads}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False])
def test_the_fused_encoder_layer_stays_fused_and_the_slow_path_is_seen_as_well(fused, device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).requires_grad_(False)
    model.train(not fused).to(device)
    x = SEQUENCE.to(device)
    with torch.inference_mode():
        expected = model(x)
        ownership, trace, result = record(model, lambda: model(x))
    assert torch.equal(result, expected)
    assert ("aten._transformer_encoder_layer_fwd.default" in operators(trace)) is fused
    assert trace.seen == {number for block in ownership.blocks for number in block.tensors}
    assert all(read.call is visit.call for visit in trace.visits for read in visit.reads)


def test_a_fused_encoder_on_nested_tensors_is_seen():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.inference_mode():
        expected = model(SEQUENCE, src_key_padding_mask=padding)
        ownership, trace, result = record(model, lambda: model(SEQUENCE, src_key_padding_mask=padding))
    assert torch.equal(result, expected)
    assert len(trace.seen) == 24 and len(ownership.blocks) == 2


def test_an_expert_tensor_beside_a_child_is_anchored_at_its_owner():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
            self.down = linear()

        def forward(self, x):
            return self.down(sum(x @ self.up[expert] for expert in range(4)))

    found = anchors(model_of(lambda self, x: self.experts(self.gate(x)), gate=linear, experts=Experts), X)
    assert found == {"gate.weight": {"gate"}, "experts.up": {"experts"}, "experts.down.weight": {"experts.down"}}


def test_a_convolution_read_by_its_parent_is_anchored_there():
    def run(self, x):
        weight = self.conv.weight.view(WIDTH, 4)
        return self.out((x.unsqueeze(-1) * weight).sum(-1) + self.conv.bias)

    found = anchors(model_of(run, conv=lambda: nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH), out=linear), X)
    assert found == {"conv.weight": {""}, "conv.bias": {""}, "out.weight": {"out"}}


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_anchor(make):
    model = model_of(lambda self, x: self.rnn(x)[0], rnn=lambda: make(WIDTH, WIDTH, 2, batch_first=True))
    found = anchors(model, SEQUENCE)
    assert len(found) == 8 and all(where == {"rnn"} for where in found.values())
    cell = model_of(lambda self, x: self.cell(x), cell=lambda: nn.GRUCell(WIDTH, WIDTH))
    assert set(anchors(cell, X)) == {"cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh"}


def test_a_read_of_bytes_around_managed_tensors_reads_them_all():
    model = model_of(lambda self, x: x, a=linear, b=linear, c=linear)
    flat = torch.randn(4, WIDTH, WIDTH)
    for number, name in enumerate("abc"):
        getattr(model.layers[0], name).weight = nn.Parameter(flat[number], requires_grad=False)

    def read(part):
        model.layers[0].run = lambda self, x: x + part.sum()
        return set(anchors(model, X))

    assert read(flat) == {"a.weight", "b.weight", "c.weight"}
    assert read(flat.flatten()[WIDTH * WIDTH - 1 : WIDTH * WIDTH * 2 + 1]) == {"a.weight", "b.weight", "c.weight"}
    assert read(flat[1:3]) == {"b.weight", "c.weight"}
    assert read(flat[3:]) == read(flat[1:1]) == set()


def test_wrapper_subclasses_are_read_by_their_inner_tensors():
    def weight() -> nn.Module:
        module = linear()
        both = TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH))
        module.weight = nn.Parameter(both, requires_grad=False)
        return module

    found = anchors(model_of(lambda self, x: self.a(x).a, a=weight), X)
    assert found == {"a.weight.a": {"a"}, "a.weight.b": {"a"}}


def test_functorch_transforms_and_autocast_are_seen():
    model = model_of(lambda self, x: torch.func.vmap(lambda row: self.a.weight @ row)(x), a=linear)
    assert anchors(model, X) == {"a.weight": {""}}
    with torch.autocast("cpu", torch.bfloat16):
        assert anchors(model_of(lambda self, x: self.a(x), a=linear), X) == {"a.weight": {"a"}}


def test_what_does_not_pass_the_dispatcher_is_not_seen():
    assert anchors(model_of(lambda self, x: x + float(self.a.weight.numpy().sum()), a=linear), X) == {}


def test_a_module_that_two_blocks_call_is_no_anchor():
    shared = nn.Identity()
    shared.forward = lambda weight, x: F.linear(x, weight)
    model = model_of(lambda self, x: self.shared(self.a.weight, x), a=linear)
    for layer in model.layers:
        layer.shared = shared
    assert anchors(model, X) == {"a.weight": {""}}


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.div_(2),
        lambda weight: weight[3].zero_(),
        lambda weight: weight.data.copy_(torch.zeros_like(weight)),
        lambda weight: torch.mul(weight, 2, out=weight),
        lambda weight: torch._foreach_mul_([torch.ones(2), weight], 2.0),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: nn.init.normal_(weight),
    ],
)
@pytest.mark.parametrize("where", ["layers.1.a", "embed"])
def test_a_write_to_a_parameter_is_refused_before_it_happens(write, where):
    model = model_of(lambda self, x: self.a(x), a=linear)
    weight = model.get_submodule(where).weight
    before = weight.clone()

    def run(x):
        write(weight)
        return x

    model.layers[1].run = lambda self, x: run(x)
    with pytest.raises(ForwardError, match=rf"writes to {where}\.weight"):
        record(model, lambda: model(X))
    assert torch.equal(weight, before)


def test_buffers_may_be_written():
    model = model_of(lambda self, x: self.norm(x), norm=lambda: nn.BatchNorm1d(WIDTH)).train()
    before = model.layers[0].norm.running_mean.clone()
    record(model, lambda: model(X))
    assert not torch.equal(model.layers[0].norm.running_mean, before)


def test_a_read_outside_its_block_is_announced_before_it_happens():
    model = model_of(lambda self, x: self.a(x), a=linear)
    weight = model.layers[1].a.weight
    expected = weight.sum()
    kept = weight.clone()
    ownership = collect(model, find_towers(model))
    weight.fill_(math.nan)
    told = []

    def bring(number: int, block: int, operator: str) -> None:
        told.append((ownership.tensors[number].name, ownership.blocks[block].name, operator))
        weight.copy_(kept)

    recorder = Recorder(ownership, on_stray=bring)
    with recorder.recording():
        total = model.layers[1].a.weight.sum()
    assert torch.equal(total, expected)
    assert told == [("layers.1.a.weight", "layers.1", "aten.sum.default")]
    assert [read.tensor for read in recorder.trace().stray] == ownership.blocks[1].tensors


def test_a_read_after_its_block_has_run_is_outside_it():
    model = model_of(lambda self, x: self.a(x), a=linear)
    _, trace, _ = record(model, lambda: (model(X), model.layers[0].a.weight.sum()))
    assert [(read.tensor, read.call) for read in trace.stray] == [(2, None)] and len(trace.visits[0].reads) == 1


def test_bound_addresses_are_recognized_instead_of_the_old_ones():
    model = model_of(lambda self, x: self.a(x), a=linear)
    ownership = collect(model, find_towers(model))
    old = model.layers[0].a.weight.detach()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    addresses = [tensor.users[0].module._parameters.get(tensor.users[0].name) for tensor in ownership.tensors]
    recorder = Recorder(ownership, [0 if tensor is None else tensor.data_ptr() for tensor in addresses])
    with recorder.recording():
        model(X)
        old.sum()
    trace = recorder.trace()
    assert trace.seen == {ownership.blocks[0].tensors[0], ownership.blocks[1].tensors[0]} and not trace.stray


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_forward_leaves_no_evidence_and_no_wrapper(error):
    model = model_of(lambda self, x: self.a(x), a=linear)
    ownership = collect(model, find_towers(model))

    def fail(self, x):
        raise error("on purpose")

    model.layers[1].run = fail
    recorder = Recorder(ownership)
    with pytest.raises(error, match="on purpose"), recorder.recording():
        model(X)
    assert not recorder.trace().complete
    assert all("forward" not in module.__dict__ for module in model.modules())
    model.layers[1].run = model.layers[0].run
    again = Recorder(ownership)
    with again.recording():
        model(X)
    assert again.trace().complete and len(again.trace().visits) == 2


def test_calls_left_open_are_closed_by_an_outer_end():
    model = model_of(lambda self, x: self.a(x), a=linear)
    recorder = Recorder(collect(model, find_towers(model)))
    outer = recorder.push(model.layers[0])
    recorder.push(model.layers[0].a)
    assert not recorder.trace().complete
    recorder.pop(outer)
    assert not recorder.trace().complete and all(call.end > 0 for call in recorder.trace().visits[0].calls)


def test_a_forward_of_the_instance_is_called_and_put_back():
    model = model_of(lambda self, x: self.a(x), a=linear)
    plain = model.layers[0].a.forward
    own = model.layers[0].a.forward = lambda x: plain(x) + 1
    ownership, trace, result = record(model, lambda: model(X))
    assert torch.equal(result, model(X)) and model.layers[0].a.forward is own
    assert trace.visits[0].reads[0].call.module is model.layers[0].a


def test_visits_are_in_order_with_repeats_and_nesting():
    model = model_of(lambda self, x: self.a(x), a=linear)
    ownership = collect(model, find_towers(model))
    model.layers[0].run = lambda self, x: model.layers[1](self.a(x))
    recorder = Recorder(ownership)
    with recorder.recording():
        for index in (1, 0, 1):
            model.layers[index](X)
    visits = recorder.trace().visits
    assert [(visit.block, visit.nested) for visit in visits] == [(1, False), (0, True), (1, True), (1, False)]
