"""Ownership: every byte has one owner, ties by overlapping bytes, buffers, subclasses and what nobody can see."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weightstream.errors import ModelError
from weightstream.ownership import Ownership, collect
from weightstream.spans import extent
from weightstream.towers import find_towers
from weightstream.unseen import StorageWatch


class Block(nn.Module):
    """A linear layer with a parameter of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Model(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.layers = nn.ModuleList([Block() for _ in range(count)])
        self.head = nn.Linear(8, 4, bias=False)


def owned(model: nn.Module, **options) -> Ownership:
    ownership = collect(model, find_towers(model), **options)
    check_bytes(ownership)
    return ownership


def check_bytes(ownership: Ownership) -> None:
    """Each tensor is in the base or in one block, no two share a byte, and all users lie inside their owner."""
    listed = sorted([*ownership.base, *(number for block in ownership.blocks for number in block.tensors)])
    assert listed == list(range(len(ownership.tensors)))
    spans = sorted(tensor.span for tensor in ownership.tensors if tensor.nbytes)
    assert all(before.end <= after.address for before, after in zip(spans, spans[1:]))
    for tensor in ownership.tensors:
        for user in tensor.users:
            assert 0 <= user.offset and user.offset + extent(user.tensor) <= tensor.nbytes


def home(ownership: Ownership, path: str) -> str:
    """The block that owns the tensor with a user at `path`, or "base"."""
    (found,) = [tensor for tensor in ownership.tensors if path in [user.path for user in tensor.users]]
    return "base" if found.block is None else ownership.blocks[found.block].name


def test_blocks_list_their_tensors_in_registration_order_and_the_rest_is_base():
    ownership = owned(Model())
    names = [ownership.tensors[number].name for number in ownership.blocks[1].tensors]
    assert names == ["layers.1.scale", "layers.1.linear.weight", "layers.1.linear.bias"]
    assert [ownership.tensors[number].name for number in ownership.base] == ["embed.weight", "head.weight"]
    assert ownership.nbytes == sum(p.nbytes for p in Model().parameters())


def test_a_tied_head_has_one_owner_with_both_users():
    model = Model()
    model.head = nn.Linear(8, 4, bias=False)
    model.head.weight = model.embed.weight
    ownership = owned(model)
    (number,) = ownership.base
    assert [user.path for user in ownership.tensors[number].users] == ["embed.weight", "head.weight"]


def test_a_tie_across_blocks_belongs_to_the_base_and_one_within_a_block_to_the_block():
    model = Model()
    model.layers[0].linear.weight = model.layers[2].linear.weight
    model.layers[1].extra = nn.Linear(8, 8)
    model.layers[1].extra.weight = model.layers[1].linear.weight
    ownership = owned(model)
    assert home(ownership, "layers.0.linear.weight") == home(ownership, "layers.2.linear.weight") == "base"
    assert home(ownership, "layers.1.extra.weight") == "layers.1"


def test_a_module_shared_by_blocks_or_with_the_outside_belongs_to_the_base():
    model = Model()
    model.layers[0].shared = model.layers[1].shared = nn.Linear(8, 8)
    model.final = model.layers[2].linear
    ownership = owned(model)
    assert home(ownership, "layers.0.shared.weight") == "base"
    assert home(ownership, "layers.2.linear.weight") == "base"
    assert home(ownership, "layers.2.scale") == "layers.2"


def test_a_block_listed_twice_owns_its_tensors():
    model = Model()
    model.layers.append(model.layers[0])
    ownership = owned(model)
    assert home(ownership, "layers.0.linear.weight") == "layers.0"
    assert len(ownership.blocks) == 3


def test_a_block_that_holds_its_model_owns_what_only_it_holds():
    model = Model()
    model.layers[0].parent = model
    ownership = owned(model)
    assert home(ownership, "embed.weight") == "base"
    assert home(ownership, "layers.0.scale") == "layers.0"
    assert home(ownership, "layers.1.scale") == "layers.1"


def test_views_of_one_another_have_one_owner_and_keep_their_offsets():
    model = Model()
    whole = model.layers[1].linear.weight
    model.layers[1].rows = nn.Parameter(whole.detach()[4:])
    model.layers[1].column = nn.Parameter(whole.detach()[:, 3])
    ownership = owned(model)
    (tensor,) = [t for t in ownership.tensors if "layers.1.linear.weight" in [user.path for user in t.users]]
    assert {user.path: user.offset for user in tensor.users} == {
        "layers.1.rows": 4 * 8 * 4, "layers.1.column": 3 * 4, "layers.1.linear.weight": 0,
    }  # fmt: skip
    assert tensor.nbytes == 8 * 8 * 4
    held = torch.frombuffer(bytearray(whole.detach().numpy().tobytes()), dtype=torch.uint8)
    for user in tensor.users:
        as_is = held[user.offset :].view(user.tensor.dtype).as_strided(user.tensor.shape, user.tensor.stride())
        assert torch.equal(as_is, user.tensor)


def test_a_short_view_does_not_end_the_interval_of_a_long_one():
    model = Model()
    whole = model.layers[1].linear.weight.detach()
    model.layers[1].second, model.layers[1].last = nn.Parameter(whole[1]), nn.Parameter(whole[7])
    ownership = owned(model)
    (tensor,) = [t for t in ownership.tensors if "layers.1.last" in [user.path for user in t.users]]
    assert [user.path for user in tensor.users] == ["layers.1.second", "layers.1.last", "layers.1.linear.weight"]


def test_parts_of_one_storage_that_do_not_overlap_have_owners_of_their_own():
    model = Model()
    flat = torch.randn(3 * 64)
    for number, layer in enumerate(model.layers):
        layer.linear.weight = nn.Parameter(flat[number * 64 : (number + 1) * 64].view(8, 8))
    ownership = owned(model)
    assert [home(ownership, f"layers.{n}.linear.weight") for n in range(3)] == ["layers.0", "layers.1", "layers.2"]


def test_interleaved_columns_of_one_storage_are_moved_as_one():
    model = Model()
    both = torch.randn(8, 16)
    model.layers[0].linear.weight = nn.Parameter(both[:, :8])
    model.layers[1].linear.weight = nn.Parameter(both[:, 8:])
    ownership = owned(model)
    assert home(ownership, "layers.0.linear.weight") == home(ownership, "layers.1.linear.weight") == "base"


def test_the_span_of_a_strided_tensor_ends_with_its_last_element():
    weight = torch.randn(10, 10)[1:9, 1:9]
    model = Model()
    model.layers[0].linear.weight = nn.Parameter(weight)
    (tensor,) = [t for t in owned(model).tensors if t.name == "layers.0.linear.weight"]
    assert (tensor.span.address, tensor.nbytes) == (weight.data_ptr(), (7 * 10 + 8) * 4)


def test_lists_that_run_in_step_lie_in_turn_and_others_as_registered():
    class Down(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
            self.resnets = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
            self.others = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])

    model = Model(0)
    model.layers.extend([Down(), Down()])
    ownership = owned(model)
    names = [ownership.tensors[number].name.removeprefix("layers.0.") for number in ownership.blocks[0].tensors]
    turns = ["resnets.0", "attentions.0", "resnets.1", "attentions.1", "resnets.2", "others.0", "others.1"]
    assert names == ["scale", "linear.weight", "linear.bias", *(f"{name}.weight" for name in turns)]


def test_empty_tensors_are_owned_and_share_nothing():
    model = Model()
    for layer in model.layers:
        layer.empty = nn.Parameter(torch.empty(0, 8))
    model.layers[0].same = model.layers[0].empty
    ownership = owned(model)
    assert [home(ownership, f"layers.{n}.empty") for n in range(3)] == ["layers.0", "layers.1", "layers.2"]
    assert home(ownership, "layers.0.same") == "layers.0"


def test_buffers_belong_to_the_base_and_so_does_a_parameter_that_shares_bytes_with_one():
    model = Model()
    for layer in model.layers:
        layer.norm = nn.BatchNorm1d(8)
    model.layers[1].register_buffer("table", model.layers[1].linear.weight.detach()[:2])
    model.layers[2].register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
    ownership = owned(model)
    assert home(ownership, "layers.0.norm.running_mean") == "base"
    assert home(ownership, "layers.0.norm.num_batches_tracked") == "base"
    assert home(ownership, "layers.0.norm.weight") == "layers.0"
    assert home(ownership, "layers.1.linear.weight") == home(ownership, "layers.2.mask") == "base"


class QuantLinear(nn.Module):
    """Keeps its weights in buffers, as GPTQ's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(64, 64, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(4, dtype=torch.float16))
        self.register_buffer("scratch", torch.zeros(64, 64), persistent=False)


def test_large_persistent_buffers_of_quantized_modules_stream():
    model = Model()
    for layer in model.layers:
        layer.quantized = QuantLinear()
    ownership = owned(model, large_buffer=1024)
    assert home(ownership, "layers.0.quantized.qweight") == "layers.0"
    assert home(ownership, "layers.0.quantized.scales") == home(ownership, "layers.0.quantized.scratch") == "base"
    by_name = {tensor.name: tensor for tensor in ownership.tensors}
    assert by_name["layers.0.quantized.qweight"].is_parameter
    assert not by_name["layers.0.quantized.scales"].is_parameter
    assert home(owned(model), "layers.0.quantized.qweight") == "base"


def test_wrapper_subclasses_are_owned_by_their_inner_tensors():
    model = Model()
    model.layers[1].linear.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)), requires_grad=False)
    ownership = owned(model)
    names = [ownership.tensors[number].name for number in ownership.blocks[1].tensors]
    assert names == ["layers.1.scale", "layers.1.linear.weight.a", "layers.1.linear.weight.b", "layers.1.linear.bias"]
    users = [ownership.tensors[number].users[0] for number in ownership.blocks[1].tensors]
    assert [user.inner for user in users] == [(), ("a",), ("b",), ()]


def test_another_way_of_opening_tensors_up_may_be_given():
    model = Model()
    packed = {id(model.layers[0].linear.weight): torch.zeros(16, dtype=torch.uint8)}
    ownership = owned(model, flatten=lambda tensor: [((), packed.get(id(tensor), tensor))])
    (tensor,) = [t for t in ownership.tensors if t.name == "layers.0.linear.weight"]
    assert tensor.nbytes == 16


class Opaque(torch.Tensor):
    """A tensor type that says nothing of its inside."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda: nn.Parameter(torch.empty(8, 8, device="meta")), "linear.weight is on the meta device"),
        (lambda: nn.UninitializedParameter(), "linear.weight is lazy"),
        (lambda: nn.Parameter(torch.eye(8).to_sparse()), "linear.weight is a torch.sparse_coo tensor"),
        (lambda: torch.eye(8).as_subclass(Opaque), "linear.weight is a Opaque"),
        (lambda: nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64).conj()), "linear.weight is a lazy conjugate"),
    ],
)
def test_what_cannot_be_bound_is_named(weight, said):
    model = Model()
    towers = find_towers(model)
    model.layers[1].linear._parameters["weight"] = weight()
    with pytest.raises(ModelError, match=f"layers.1.{said}"):
        collect(model, towers)


def test_bytes_shared_at_an_odd_distance_are_refused():
    raw = torch.zeros(64, dtype=torch.uint8)
    model = Model()
    model.layers[0].bytes = nn.Parameter(raw[1:40], requires_grad=False)
    model.layers[0].floats = nn.Parameter(raw[4:20].view(torch.float32))
    with pytest.raises(ModelError, match="layers.0.floats starts 3 bytes into"):
        collect(model, find_towers(model))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.ModuleList(), nn.Linear(0, 0)])
def test_a_model_without_parameters_is_refused(model):
    with pytest.raises(ModelError, match="no parameters"):
        collect(model, find_towers(model))


def test_modules_and_tensors_outside_the_module_tree_are_reported():
    model = Model()
    model.projections = [nn.Linear(8, 8), nn.Linear(8, 8)]
    model.layers[0].table = {"cos": torch.ones(4), "nested": [(nn.Parameter(torch.ones(2)),)]}
    model.order = [model.layers[0], model.embed.weight]
    model.lstm = nn.LSTM(4, 4)
    found = {(unseen.path, unseen.kind, unseen.nbytes) for unseen in owned(model).unseen}
    assert found == {
        ("projections[0]", "module", 288), ("projections[1]", "module", 288),
        ("layers.0.table['cos']", "tensor", 16), ("layers.0.table['nested'][0][0]", "parameter", 8),
    }  # fmt: skip


def test_storages_that_outlive_binding_are_named():
    model = Model()
    ownership = owned(model)
    watch = StorageWatch(ownership)
    assert len(watch.survivors()) == len(list(model.parameters()))
    cached = model.layers[1].linear.weight.detach()[2:]
    del ownership
    for parameter in model.parameters():
        parameter.data = torch.zeros(1)
    gc.collect()
    assert watch.survivors() == ["layers.1.linear.weight"]
    assert watch.survivors(held=["layers.1.linear.weight"]) == []
    del cached
    assert watch.survivors() == []
