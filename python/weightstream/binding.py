"""Binds a model's tensors to their device addresses, once, and gives them back as plain CPU tensors.

    attach   hand_over: bytes go to where the copies read them (their file, in place, or a slab); the tensors are still
                        CPU tensors
             bind:      each tensor's `.data` becomes a tensor at its own device address, a capsule of its bytes only
    detach   unbind:    `.data` becomes the host bytes again; buffers are copied back first

Objects keep their identity: `param.data = …` never makes a new Parameter. Only wrappers (tensor subclasses made of inner
tensors) are built anew and set on their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from ._native import Offloader, Plan
from .guard import ParameterGuard, managed_class
from .ownership import Owned, Ownership, User
from .subclasses import DeviceForms, Wrapper

__all__ = ["Binding"]

_GROUP = 256 << 20
"""Bytes that are handed over together: what may be held twice for a moment."""

_data_ptr = torch.Tensor.data_ptr
_set_data = torch.Tensor.data.__set__
"""What `tensor.data = …` does, also where a guard refuses it."""
_use_count = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(eq=False)
class _Leaf:
    """A plain tensor of the model: one object, however often it is registered."""

    tensor: Tensor
    """The object itself: a parameter, a buffer or a wrapper's inner tensor."""
    user: User
    """Where it was met first."""
    owner: Owned
    """Whose bytes it shows."""
    requires_grad: bool
    """Whether it required grad before."""
    host: Tensor | None = None
    """Its host bytes."""
    device: Tensor | None = None
    """For an inner tensor: the tensor at its device address."""
    cls: type | None = None
    """The class a parameter had before it was guarded."""

    @property
    def is_inner(self) -> bool:
        """Whether it belongs to a wrapper."""
        return bool(self.user.inner)

    @property
    def is_resident_buffer(self) -> bool:
        """Whether the model may write it: its device bytes are then the true ones."""
        plain = not isinstance(self.tensor, nn.Parameter) and not self.is_inner and not self.user.held
        return plain and self.owner.block is None


@dataclass(eq=False)
class _Wrapped:
    """A wrapper with the places where its inner tensors are registered."""

    wrapper: Wrapper
    users: list[User]
    built: Tensor | None = None
    """The one on the device's tensors."""
    plain: Tensor | None = None
    """The one that detach puts back: one object for all its users, also if it takes two calls."""


class Binding:
    """Every tensor of one model, where its bytes are on the host and on the device."""

    def __init__(self, ownership: Ownership, forms: DeviceForms, device: torch.device) -> None:
        """Notes what there is. Changes nothing."""
        self.device = device
        self.numbers: dict[int, int] = {}
        """The number in the native plan of each owned tensor that has bytes."""
        self.in_files: list[str] = []
        """Tensors loaded by `offload` whose bytes the copies read from their file."""
        self._ownership = ownership
        self._addresses: list[int] = [0] * len(ownership.tensors)
        self._leaves: dict[int, _Leaf] = {}
        self._wrapped: dict[int, _Wrapped] = {}
        self._held: dict[tuple[int, torch.dtype, torch.Size], _Leaf] = {}
        """What parameters hold, by what it is on the device."""
        self._slots: tuple[list[dict[str, Any]], list[str], list[int], list[str]] = ([], [], [], [])
        for owned in ownership.tensors:
            if owned.nbytes:
                self.numbers[owned.index] = len(self.numbers)
            for user in owned.users:
                if id(user.tensor) not in self._leaves:
                    self._leaves[id(user.tensor)] = _Leaf(user.tensor, user, owned, user.tensor.requires_grad)
                registered = _registered(user)
                if user.inner and id(registered) in forms.wrappers:
                    wrapper = forms.wrappers[id(registered)]
                    self._wrapped.setdefault(id(registered), _Wrapped(wrapper, [])).users.append(user)

    def hand_over(
        self,
        plan: Plan,
        watch: Callable[[int], object] | None = None,
        locks: Callable[[Owned], bool] = lambda owned: True,
    ) -> list[str]:
        """Gives the plan every tensor's bytes, some at a time, and lets go of those that were copied.

        The model stays a CPU model, bit for bit. Returns the names of the tensors that are read where they were; those of
        them that are read from their file are in `in_files`. `watch` hears of the bytes page-locked, and may raise. `locks`
        says which tensors are page-locked.
        """
        in_place: list[str] = []
        for group in self._groups(locks):
            lock = locks(group[0])
            keep = [[user.tensor.untyped_storage() for user in owned.users] for owned in group]
            entries = [
                (self.numbers[owned.index], owned.span.address, owned.nbytes, storages)
                for owned, storages in zip(group, keep)
            ]
            del keep
            placed = plan.source(entries, watch, lock)
            entries.clear()
            for owned, (address, capsule) in zip(group, placed):
                if capsule is None:
                    in_place.extend(user.path for user in owned.users)
                    if not address:
                        self.in_files.extend(user.path for user in owned.users)
                memory = None if capsule is None else torch.utils.dlpack.from_dlpack(capsule)
                for leaf in self._leaves_of(owned):
                    with torch.inference_mode(leaf.tensor.is_inference()), torch.no_grad():
                        if memory is None:
                            leaf.host = leaf.tensor.detach()
                        else:
                            leaf.host = leaf.tensor.data = _shaped(memory, leaf)
        for leaf in self._leaves.values():
            if leaf.host is None:  # no bytes: nothing to hand over
                leaf.host = leaf.tensor.detach()
        return in_place

    def bind(self, offloader: Offloader, present: Callable[[Owned], Callable[[], bool]]) -> None:
        """Puts every tensor at its device address, guards the parameters and switches requires_grad off."""
        memories = {
            index: torch.utils.dlpack.from_dlpack(offloader.capsule(number)) for index, number in self.numbers.items()
        }
        for index, number in self.numbers.items():
            self._addresses[index] = offloader.address(number)
        for leaf in self._leaves.values():
            memory = memories.get(leaf.owner.index)
            with torch.inference_mode(leaf.tensor.is_inference()), torch.no_grad():
                if memory is None:
                    at_device = torch.empty_strided(
                        leaf.tensor.shape, leaf.tensor.stride(), dtype=leaf.tensor.dtype, device=self.device
                    )
                else:
                    at_device = _shaped(memory, leaf)
                if leaf.is_inner:
                    leaf.device = at_device
                    continue
                leaf.tensor.requires_grad_(False)
                leaf.tensor.data = at_device
            if isinstance(leaf.tensor, nn.Parameter):
                leaf.cls = type(leaf.tensor)
                leaf.tensor._weightstream = ParameterGuard(
                    leaf.user.path, leaf.requires_grad, leaf.host, present(leaf.owner)
                )
                leaf.tensor.__class__ = managed_class(leaf.cls)
        for entry in self._wrapped.values():
            entry.built = entry.wrapper.build({user.inner: self._leaf(user).device for user in entry.users})
            for user in entry.users:
                _register(user, entry.built)
        for leaf in self._leaves.values():
            if leaf.user.held and leaf.owner.nbytes:
                self._held[(_pointer(leaf.tensor), leaf.tensor.dtype, leaf.tensor.shape)] = leaf
        self._note_slots()

    def shared_in_place(self, names: Collection[str]) -> list[str]:
        """Which of the tensors that are read in place somebody outside the model can still write."""
        if _use_count is None:
            return []
        hosts: dict[int, list[_Leaf]] = {}
        for leaf in self._leaves.values():
            if leaf.user.path in names:
                hosts.setdefault(leaf.host.untyped_storage()._cdata, []).append(leaf)
        found: list[str] = []
        for cdata, leaves in hosts.items():
            # Our host tensors, and the one Python object for the storage that is passed along with the bytes.
            if _use_count(cdata) > len(leaves) + 1:
                found.extend(leaf.user.path for leaf in leaves)
        return found

    def addresses(self) -> list[int]:
        """Where each owned tensor is on the device; 0 if it has no bytes."""
        return self._addresses

    def moved(self) -> str | None:
        """The name of a tensor that is not where it was bound, or None: a comparison a tensor."""
        modules, names, pointers, _ = self._slots
        try:
            # Twice as fast: nobody looks for a __torch_function__ in the parameters' class. 0.11 us a tensor, of which
            # 0.09 are data_ptr; PyTorch's own comparison of pointers in C++ takes 0.17.
            with torch._C.DisableTorchFunctionSubclass():
                same = list(map(_data_ptr, map(getitem, modules, names))) == pointers
        except (KeyError, TypeError, RuntimeError):
            same = False
        if not same:
            for module, name, pointer, path in zip(*self._slots):
                tensor = module.get(name)
                if not isinstance(tensor, Tensor) or _pointer(tensor) != pointer:
                    return path
        for entry in self._wrapped.values():
            for user in entry.users:
                if _registered(user) is not entry.built:
                    return user.path
        return None

    def host_value(self, tensor: Tensor) -> Tensor | None:
        """The CPU tensor of a registered one, for state_dict; None if it is not managed."""
        leaf = self._leaves.get(id(tensor))
        if leaf is not None:
            return tensor.detach().to("cpu", copy=True) if leaf.is_resident_buffer else leaf.host
        for entry in self._wrapped.values():
            if entry.built is tensor:
                return self._on_host(entry)
        return None

    @property
    def holds(self) -> bool:
        """Whether there are tensors that parameters hold beside themselves."""
        return bool(self._held)

    def host_of_held(self, tensor: Tensor) -> Tensor | None:
        """The CPU tensor of one that shows the bytes of a tensor that a parameter holds; None if it shows others.

        Libraries put such tensors into state_dicts by themselves, detached.
        """
        leaf = self._held.get((_pointer(tensor), tensor.dtype, tensor.shape))
        return None if leaf is None else self.host_value(leaf.tensor)

    def unbind(self) -> None:
        """Gives back a plain CPU model: same objects, same bits, ties, classes and requires_grad as before.

        The device's work on the buffers must have run. What an interrupt cuts short is completed by the next call.
        """
        for leaf in self._leaves.values():
            if leaf.is_inner:
                continue
            if leaf.is_resident_buffer:
                with torch.inference_mode():
                    leaf.host.copy_(leaf.tensor)
            with torch.inference_mode(leaf.host.is_inference()), torch.no_grad():
                _set_data(leaf.tensor, leaf.host)
                # The guard goes last: a parameter is never plain while its bytes are the device's.
                if leaf.cls is not None:
                    leaf.tensor.__class__ = leaf.cls
                    leaf.tensor.__dict__.pop("_weightstream", None)
                leaf.tensor.requires_grad_(leaf.requires_grad)
        self._unbind_replaced_buffers()
        for entry in self._wrapped.values():
            if entry.plain is None:
                entry.plain = self._on_host(entry)
            for user in entry.users:
                if _registered(user) is entry.built:
                    _register(user, entry.plain)
        self._slots = ([], [], [], [])
        self._held.clear()

    def _unbind_replaced_buffers(self) -> None:
        """Copies buffers that a forward put in the place of managed ones: they may be views of device memory."""
        for owned in self._ownership.tensors:
            for user in owned.users:
                current = user.module._buffers.get(user.name) if user.is_buffer and not user.inner else None
                if current is not None and current is not user.tensor:
                    user.module._buffers[user.name] = current.detach().to("cpu", copy=True)

    def _groups(self, locks: Callable[[Owned], bool]) -> Iterator[list[Owned]]:
        """The owned tensors that have bytes, base first, then block by block, cut where a group gets large and where `locks`
        says another thing."""
        orders = [self._ownership.base, *(block.tensors for block in self._ownership.blocks)]
        for order in orders:
            group: list[Owned] = []
            size = 0
            for index in order:
                owned = self._ownership.tensors[index]
                if group and (size + owned.nbytes > _GROUP or locks(owned) != locks(group[0])):
                    yield group
                    group, size = [], 0
                if owned.nbytes:
                    group.append(owned)
                    size += owned.nbytes
            if group:
                yield group

    def _leaves_of(self, owned: Owned) -> list[_Leaf]:
        return list({id(user.tensor): self._leaves[id(user.tensor)] for user in owned.users}.values())

    def _leaf(self, user: User) -> _Leaf:
        return self._leaves[id(user.tensor)]

    def _on_host(self, entry: _Wrapped) -> Tensor:
        return entry.wrapper.on_host({user.inner: self._leaf(user).host for user in entry.users}, self.device)

    def _note_slots(self) -> None:
        """Writes down what must be where at each step, in columns so that comparing them is one pass in C."""
        for owned in self._ownership.tensors:
            for user in owned.users:
                leaf = self._leaf(user)
                # A forward may put another buffer in a buffer's place; what streams must stay where it is.
                if not user.inner and not user.held and owned.nbytes and not leaf.is_resident_buffer:
                    entries = user.module._buffers if user.is_buffer else user.module._parameters
                    row = (entries, user.name, user.tensor.data_ptr(), user.path)
                    for column, value in zip(self._slots, row):
                        column.append(value)


def _shaped(memory: Tensor, leaf: _Leaf) -> Tensor:
    """The leaf's dtype, shape and strides on the owner's bytes. A tensor of its own, not a view of another."""
    like = leaf.tensor
    tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), leaf.user.offset // like.element_size(), like.shape, like.stride())


def _registered(user: User) -> Tensor:
    return (user.module._buffers if user.is_buffer else user.module._parameters)[user.name]


def _register(user: User, tensor: Tensor) -> None:
    if _registered(user) is not tensor:
        setattr(user.module, user.name, tensor)


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return -1
