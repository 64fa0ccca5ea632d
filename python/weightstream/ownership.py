"""Who owns each byte of a model: which tensors there are, who uses them, and which block or the base they belong to.

Ties are found by overlapping byte intervals, so that views of one another and tensors that share part of a storage
have one owner too. A tensor belongs to the innermost block that contains all its users, else to the base; buffers
belong to the base, except large ones of known quantized modules. Reads the module tree and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .errors import ModelError
from .held import HeldTensors
from .reading_order import expected_order
from .spans import InnerPath, Span, inner_tensors, is_wrapper, span_of
from .towers import Tower
from .unseen import Unseen, find_unseen

LARGE_BUFFER = 64 * 1024
"""Bytes from which a persistent buffer of a quantized module is treated as a weight."""

_QUANTIZED_CLASSES = ("QuantLinear", "WQLinear")
"""Parts of the class names of GPTQ and AWQ modules, which keep their weights in buffers."""

Flatten = Callable[[Tensor], list[tuple[InnerPath, Tensor]]]
"""Gives the plain tensors behind a registered one; replaced where a subclass repacks itself for its device."""


@dataclass(frozen=True, eq=False)
class User:
    """One place in the module tree where bytes are registered: enough to rebuild the tensor there."""

    module: nn.Module
    """The module that holds it."""
    name: str
    """Its attribute name in that module."""
    path: str
    """Its dotted name in the model, inner attributes of a wrapper included."""
    is_buffer: bool
    """Whether it is registered as a buffer."""
    inner: InnerPath
    """Attributes that lead from the registered tensor to this one; empty for a plain tensor."""
    tensor: Tensor
    """The plain tensor itself; its dtype, shape and strides are what the rebuilt one has."""
    offset: int
    """Bytes from the start of the owned interval to the tensor's first element."""
    held: bool = False
    """Whether it is registered nowhere: the parameter `name` of the module holds it."""


@dataclass(eq=False)
class Owned:
    """Bytes that are moved as one: all registered tensors whose intervals overlap."""

    index: int
    """Its number, by which plan and recorder speak of it."""
    span: Span
    """The interval that covers all users."""
    users: list[User]
    """All of them, in registration order; never empty."""
    block: int | None
    """The block that owns it; None for the base."""

    @property
    def name(self) -> str:
        """The dotted name of its first user."""
        return self.users[0].path

    @property
    def nbytes(self) -> int:
        """Bytes of the interval."""
        return self.span.nbytes

    @property
    def is_parameter(self) -> bool:
        """Whether it may not be written in a forward: a parameter, or a buffer that is streamed like one."""
        return self.block is not None or any(not user.is_buffer for user in self.users)


@dataclass(eq=False)
class Block:
    """A block of a tower with what it owns."""

    index: int
    """Its number across all towers."""
    tower: int
    """The number of its tower."""
    name: str
    """Its dotted name."""
    module: nn.Module
    """The module whose forward is its turn."""
    tensors: list[int] = field(default_factory=list)
    """Its tensors in the order in which they are expected to be read: mostly that of registration."""


@dataclass(eq=False)
class Ownership:
    """Every tensor of a model with its owner."""

    tensors: list[Owned]
    """All, in registration order; the index is the tensor's number."""
    base: list[int]
    """Those outside every block."""
    blocks: list[Block]
    """All blocks, tower by tower."""
    towers: list[Tower]
    """The towers they came from."""
    unseen: list[Unseen]
    """Modules and tensors that the model holds outside its module tree, which nobody places."""
    strangers: frozenset[int] = frozenset()
    """Modules, by id, that lie in the model and belong to somebody else: their forwards are not its to wrap or to watch."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def collect(
    model: nn.Module,
    towers: Sequence[Tower],
    *,
    flatten: Flatten = inner_tensors,
    large_buffer: int = LARGE_BUFFER,
    buffers: bool = True,
    wanted: Callable[[Tensor], bool] | None = None,
    strangers: frozenset[int] = frozenset(),
) -> Ownership:
    """Finds every parameter and buffer of `model` and gives each an owner.

    Without `buffers` those that a forward may write, and that share no bytes with a parameter, are left to their model.
    Registered tensors that are not `wanted` are somebody else's, and so are the modules whose ids are `strangers`.

    Raises ModelError, naming the tensor, for what has no bytes of its own (meta, lazy, sparse, opaque subclasses) or
    cannot be rebuilt from them, and for a model without parameters.
    """
    blocks: list[Block] = []
    for number, tower in enumerate(towers):
        for name, module in tower.blocks:
            blocks.append(Block(len(blocks), number, name, module))
    holders = _holders(model, blocks)
    tensors: list[Owned] = []
    for span, users in _grouped(users_of(model, flatten, wanted)):
        if not buffers and all(user.is_buffer and not is_quantized(user) for user in users):
            continue
        owners = set().union(*(holders[id(user.module)] for user in users))
        block = owners.pop() if len(owners) == 1 else None
        if block is not None and not _streams(users, span.nbytes, large_buffer):
            block = None
        tensors.append(Owned(len(tensors), span, users, block))
    if not any(not user.is_buffer and tensor.nbytes for tensor in tensors for user in tensor.users):
        raise ModelError(f"{type(model).__name__} has no parameters to place")
    for tensor in tensors:
        if tensor.block is not None:
            blocks[tensor.block].tensors.append(tensor.index)
    for block in blocks:
        order = expected_order(block.module)
        # The sort is stable: a module's own tensors keep their order, and so does what lies under unknown lists.
        block.tensors.sort(key=lambda number: order.get(id(tensors[number].users[0].module), len(order)))
    base = [tensor.index for tensor in tensors if tensor.block is None]
    return Ownership(tensors, base, blocks, list(towers), find_unseen(model), strangers)


def _holders(model: nn.Module, blocks: Sequence[Block]) -> dict[int, set[int | None]]:
    """For each module the blocks that reach it without passing through another block; None is the base."""
    edges = {id(block.module): block.index for block in blocks}
    holders: dict[int, set[int | None]] = {}

    def walk(start: nn.Module, label: int | None) -> None:
        todo = [start]
        while todo:
            module = todo.pop()
            labels = holders.setdefault(id(module), set())
            if label in labels:
                continue
            labels.add(label)
            todo.extend(child for child in module.children() if id(child) not in edges)

    if id(model) not in edges:
        walk(model, None)
    for block in blocks:
        walk(block.module, block.index)
    return holders


def users_of(model: nn.Module, flatten: Flatten, wanted: Callable[[Tensor], bool] | None = None) -> list[User]:
    """All registered tensors, or those that are `wanted`, by module in pre-order, wrappers opened up; behind them what parameters
    hold beside themselves."""
    users: list[User] = []
    held: list[User] = []
    finder = HeldTensors()
    for prefix, module in model.named_modules():
        entries = [(name, tensor, False) for name, tensor in module._parameters.items()]
        entries += [(name, tensor, True) for name, tensor in module._buffers.items()]
        for name, tensor, is_buffer in entries:
            if tensor is None or (wanted is not None and not wanted(tensor)):
                continue
            path = f"{prefix}.{name}" if prefix else name
            _check_open(path, tensor)
            for inner, leaf in flatten(tensor):
                leaf_path = ".".join((path, *inner))
                _check_plain(leaf_path, leaf)
                users.append(User(module, name, leaf_path, is_buffer, inner, leaf, 0))
            for reach, leaf in [] if is_buffer or is_wrapper(tensor) else finder.of(module, name, tensor):
                leaf_path = f"{prefix}.{reach}" if prefix else reach
                _check_open(leaf_path, leaf)
                _check_plain(leaf_path, leaf)
                held.append(User(module, name, leaf_path, False, (), leaf, 0, held=True))
    registered = {id(user.tensor) for user in users}
    return users + [user for user in held if id(user.tensor) not in registered]


def _check_open(path: str, tensor: Tensor) -> None:
    """Refuses what cannot be opened up into plain tensors."""
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise ModelError(f"{path} is lazy and has no shape yet: run the model once before attaching")
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    if dispatch is not Tensor.__torch_dispatch__ and not is_wrapper(tensor):
        kind = type(tensor).__name__
        raise ModelError(f"{path} is a {kind}, a tensor type without __tensor_flatten__: it cannot be bound")


def _check_plain(path: str, tensor: Tensor) -> None:
    """Refuses what has no bytes, or whose bytes do not say what it is."""
    if tensor.is_meta:
        raise ModelError(f"{path} is on the meta device: load its weights before attaching")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ModelError(f"{path} is a {kind} tensor: only strided ones can be bound")
    if tensor.is_conj() or tensor.is_neg():
        raise ModelError(f"{path} is a lazy conjugate or negation: call resolve_conj() or resolve_neg() first")


def _grouped(users: Sequence[User]) -> list[tuple[Span, list[User]]]:
    """Groups of users whose intervals overlap, in registration order, each with its place in the interval."""
    return [(span, [_placed(users[i], span) for i in members]) for span, members in overlapping(users)]


def overlapping(users: Sequence[User]) -> list[tuple[Span, list[int]]]:
    """Which users' intervals overlap, by position, in registration order; empty tensors are grouped by identity."""
    placed: list[tuple[object, Span, int]] = []
    groups: dict[object, list[int]] = {}
    spans: dict[object, Span] = {}
    for position, user in enumerate(users):
        span = span_of(user.tensor)
        if span.nbytes == 0:
            groups.setdefault(("empty", id(user.tensor)), []).append(position)
            spans[("empty", id(user.tensor))] = span
        else:
            placed.append((user.tensor.device, span, position))
    placed.sort(key=lambda entry: (str(entry[0]), entry[1]))
    key: tuple[object, int] | None = None
    for device, span, position in placed:
        if key is None or key[0] != device or span.address >= spans[key].end:
            key = (device, span.address)
            groups[key], spans[key] = [], span
        held = spans[key]
        spans[key] = Span(held.address, max(held.end, span.end) - held.address)
        groups[key].append(position)
    ordered = sorted(groups.items(), key=lambda entry: min(entry[1]))
    return [(spans[key], sorted(members)) for key, members in ordered]


def _placed(user: User, span: Span) -> User:
    """The user with its offset in the interval that owns it."""
    own = span_of(user.tensor)
    offset = own.address - span.address if own.nbytes else 0
    if offset % user.tensor.element_size():
        raise ModelError(f"{user.path} starts {offset} bytes into bytes it shares, not a multiple of its element size")
    return replace(user, offset=offset)


def _streams(users: Sequence[User], nbytes: int, large_buffer: int) -> bool:
    """Whether a block may stream it: parameters, and what quantized modules keep in buffers instead of them."""
    buffers = [user for user in users if user.is_buffer]
    if not buffers:
        return True
    return len(buffers) == len(users) and nbytes >= large_buffer and all(is_quantized(user) for user in buffers)


def is_quantized(user: User) -> bool:
    """Whether the buffer is persistent and its module is of a class known to keep weights in buffers."""
    persistent = user.name not in user.module._non_persistent_buffers_set
    return persistent and any(part in type(user.module).__name__ for part in _QUANTIZED_CLASSES)
