"""`attach`: makes a model stream its weights. Either all of it happens or none."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import nn

from ._native import Plan, Share, parse_bytes
from .attachment import Attachment, undo
from .binding import Binding
from .calls import LEAVES
from .checks import MARK, check_model
from .devices import DeviceArgument, Target, open_target
from .errors import BudgetError
from .group import Doors, Group
from .held import check_held
from .locking import watch_locking
from .overrides import Overrides
from .ownership import Owned, Ownership, collect
from .refusals import refuse_changes
from .running import Part, Runtime
from .startup.phases import phase
from .steps import ModelSteps, streaming_blocks
from .subclasses import DeviceForms
from .towers import Tower, TowersArgument, find_towers
from .uncompiled import keep_package_uncompiled
from .unseen import StorageWatch
from .wrap import wrap_root

__all__ = ["Place", "Prepared", "attach"]

_MOST_UNITS = (1 << 32) - 1
"""More than any model has; what is asked for beyond it means the same."""
_UNLIMITED = "100%"
"""The budget with which a model is planned to see what it needs at least."""
_PATIENCE = 100
"""Interrupts that cannot keep a failed attach from being undone."""


def attach(
    model: nn.Module,
    *,
    device: DeviceArgument = "auto",
    budget: Union[int, str, None] = None,
    look_ahead: Union[int, None] = None,
    towers: TowersArgument = None,
    pinned_memory: Union[bool, int, str] = True,
) -> Attachment:
    """Makes `model`, which is in CPU memory, run on `device` with at most `budget` of device memory for its weights.

    device: "auto" takes CUDA if PyTorch sees a GPU and its driver can stream, else the emulator in host memory;
        "cuda", "cuda:1", "host" or a `HostDevice` say which. `report()["reason"]` says why.
    budget: bytes, or a text: "512MiB" (KiB to TiB are powers of 1024), "1.5GB" (powers of 1000), "30%" of the device's
        memory. It counts every page that holds weights or buffers, rounding included. None takes 60 % of the device
        memory that is free now.
    look_ahead: the most units that are copied ahead of the one that computes; None lets the planner choose.
    towers: the lists of repeated blocks to stream, by name or module; None finds them.
    pinned_memory: whether the weights' host memory is page-locked, as far as machine and control group allow: the link is
        then used fully. False locks nothing but a staging ring of at most 128 MiB, through which weights are copied from
        memory or read from their file; bytes or a text like "8GiB" is the most that this process may lock beside it.

    The model then computes on the device, with the same bits out. Inputs go to `attachment.device`. Parameters do not
    require grad while attached, and the bits are those of the resident model whose parameters do not: for some modules
    (`nn.GRU`, `nn.RNN`, attention to another sequence) PyTorch chooses its kernels by that, under `no_grad` too.
    Refused or interrupted, it changes nothing: see `weightstream.errors`. In `offload.loading_context` it reports the
    phase "Pinning" and can be cancelled.

    Weights that `offload` loaded, and nobody changed since, are read from their file: page-locked in the page cache where
    the driver and the limits allow it, without a copy. `startup.collect_startup_timings` records phases `attach.*`.
    """
    whole = phase("attach")
    try:
        whole.__enter__()
        return _attach(whole, model, device, budget, look_ahead, towers, pinned_memory)
    except BaseException as error:
        whole.__exit__(type(error), error, error.__traceback__)
        raise


def _attach(
    whole: phase,
    model: nn.Module,
    device: DeviceArgument,
    budget: Union[int, str, None],
    look_ahead: Union[int, None],
    towers: TowersArgument,
    pinned_memory: Union[bool, int, str],
) -> Attachment:
    """Attaches, and ends the phase `whole` where that can be undone still."""
    check_model(model)
    if look_ahead is not None:
        look_ahead = _count(look_ahead)
    lock = _lock(pinned_memory)
    with phase("attach.device"):
        target = open_target(device)
    with phase("attach.plan"):
        prepared = Prepared(model, target, find_towers(model, towers), budget, look_ahead, lock)
    # What interrupts the phase's end undoes everything.
    return prepared.start(finish=lambda: whole.__exit__(None, None, None))


@dataclass(frozen=True)
class Place:
    """Where a model shares its device."""

    group: Group
    """With whom."""
    name: str
    """Under which name."""
    company: list[str] | None
    """The names of the models that may stay while it runs; None if it accepts everyone, stays with everyone and never leaves."""
    hooked: tuple[tuple[nn.Module, str], ...] = ()
    """Methods besides the root's forward that need the model: the module and the name of each."""
    adapt: Callable[[Any], Any] | None = None
    """What is done to the arguments of the root and of those methods."""
    wanted: Callable[[torch.Tensor], bool] | None = None
    """Which registered tensors are the model's to place; None for all."""
    strangers: frozenset[int] = frozenset()
    """Modules in it, by id, that somebody else manages."""
    loose: tuple[nn.Module, ...] = ()
    """Modules of it with tensors that somebody else places, whose calls need the model nevertheless."""
    parts: tuple[Part, ...] = ()
    """What it shares with others."""


class Prepared:
    """A model that is planned and not changed yet."""

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        towers: list[Tower],
        budget: Union[int, str, None],
        look_ahead: Union[int, None],
        lock: Union[int, None],
        place: Union[Place, None] = None,
        threads: Union[int, None] = None,
    ) -> None:
        """Refuses what cannot be attached or does not fit. `threads` copy into page-locked memory; None leaves it to us."""
        self.model = model
        self.target = target
        self.place = place
        self.forms = DeviceForms(target.device)
        for name, parameter in model.named_parameters():
            check_held(name, parameter, target.device)
        wanted, strangers = (None, frozenset()) if place is None else (place.wanted, place.strangers)
        # The pages of a model that shares its device may be another's between its steps: what it writes is not kept there.
        self.ownership = collect(
            model,
            towers,
            flatten=self.forms.flatten,
            buffers=place is None,
            wanted=wanted,
            strangers=strangers,
        )
        self.binding = Binding(self.ownership, self.forms, target.device)
        shared = None if place is None else (place.group.share, place.name, place.company)
        self.plan = _plan(target, self.ownership, self.binding, budget, look_ahead, lock, shared, threads)

    def start(
        self, locks: Callable[[Owned], bool] = lambda owned: True, finish: Callable[[], object] = lambda: None
    ) -> Attachment:
        """Attaches the model: all of it happens or none. `locks` says which tensors are page-locked, as far as may be.
        `finish` is called last, where all can be undone still."""
        model, target, ownership, binding = self.model, self.target, self.ownership, self.binding
        watch = StorageWatch(ownership)
        shared = {user.path for owned in ownership.tensors for user in owned.users if user.tensor.is_shared()}
        locking = watch_locking(model, ownership.nbytes)
        with phase("attach.page_lock") as locked:
            locked.count("weights.bytes", ownership.nbytes)
            in_place = binding.hand_over(self.plan, locking, locks)
        with phase("attach.upload"):
            runtime = Runtime(self.plan.start(locking), target)
        turns, overrides = Overrides(), Overrides()
        try:
            with phase("attach.bind"):
                binding.bind(runtime.offloader, lambda owned: runtime.presence_of(owned.index))
                self.forms.forget()
            keep_package_uncompiled()
            root = model.forward
            steps = ModelSteps(model, ownership, binding, runtime, turns)
            name = type(model).__name__
            if id(model) not in {id(block.module) for block in streaming_blocks(ownership)}:
                overrides.set(model, "forward", wrap_root(runtime, name, root, steps))
            if self.place is not None:
                self._join(self.place, runtime, steps, overrides)
            refuse_changes(model, binding, overrides, ownership.strangers)
            survivors = [*watch.survivors(in_place), *binding.shared_in_place(set(in_place))]
            facts = _facts(target, ownership, survivors, binding, in_place, sorted(shared.difference(in_place)))
            attachment = Attachment(model, ownership, binding, runtime, steps, turns, overrides, facts)
            if locking is not None:
                locking.finish()
            for module in model.modules():
                if id(module) not in ownership.strangers:
                    overrides.set(module, MARK, attachment)
            _settle_adapters(model)
            _load_kernels(model, target)
            finish()
            return attachment
        except BaseException:
            runtime.closing = True
            _insist(lambda: undo(binding, turns, overrides, runtime))
            raise

    def _join(self, place: Place, runtime: Runtime, steps: ModelSteps, overrides: Overrides) -> None:
        """Makes every way into the model bring it first."""
        runtime.adapt, runtime.name, runtime.company = place.adapt, place.name, place.company
        runtime.parts.extend(place.parts)
        for part in place.parts:
            part.joined(runtime)
        for module, method in place.hooked:
            where = f"{type(module).__name__}.{method}"
            overrides.set(module, method, wrap_root(runtime, where, getattr(module, method), steps))
        # Also modules of blocks: which of these stream, and have turns that bring the model, changes with its budget.
        users = [user.module for owned in self.ownership.tensors for user in owned.users]
        leaves = [module for module in self.model.modules() if isinstance(module, LEAVES)]
        modules = {
            id(module): module
            for module in (*users, *leaves, *place.loose)
            if module is not self.model and id(module) not in place.strangers
        }
        runtime.doors = Doors(list(modules.values()), runtime.bring)
        place.group.join(runtime)
        place.group.refresh()


def _settle_adapters(model: nn.Module) -> None:
    """Brings the tensors of adapters that were loaded before to the device, within the budget."""
    adapters = sys.modules.get(f"{__package__}.adapters.state")
    if adapters is not None:
        adapters.attached(model)


def _load_kernels(model: nn.Module, target: Target) -> None:
    """Loads what the model's quantized layers need on the GPU: no forward waits for it, nor a graph that is captured."""
    layers = sys.modules.get(f"{__package__}.quant.module")
    if layers is None or target.emulated:
        return
    quantized = [module for module in model.modules() if isinstance(module, layers.QuantModule)]
    if quantized:
        devices = sys.modules[f"{__package__}.quant.devices"]
        with phase("attach.kernels"):
            devices.prepare(((layer.quant_text, layer.compute_dtype) for layer in quantized), target.device)


def _insist(work: Callable[[], None]) -> None:
    """Does it to the end: whoever interrupts an attach more than once has no handle to complete it with."""
    for _ in range(_PATIENCE):
        try:
            return work()
        except KeyboardInterrupt:  # noqa: PERF203
            continue
    return work()


def _plan(
    target: Target,
    ownership: Ownership,
    binding: Binding,
    budget: Any,
    look_ahead: int | None,
    lock: int | None,
    place: tuple[Share, str, list[str] | None] | None,
    threads: int | None,
) -> Plan:
    """The native plan for the model's tensors; refuses what does not fit."""
    numbers = binding.numbers
    blocks = streaming_blocks(ownership)
    towers = [
        (
            tower.name,
            [
                (block.name, [numbers[i] for i in block.tensors if i in numbers])
                for block in blocks
                if block.tower == position
            ],
        )
        for position, tower in enumerate(ownership.towers)
    ]
    streamed = [tower for tower in towers if tower[1]]

    def plan(budget: Any) -> Plan:
        return Plan(
            target.native,
            [(ownership.tensors[i].name, ownership.tensors[i].nbytes) for i in numbers],
            [numbers[i] for i in ownership.base if i in numbers],
            streamed,
            budget,
            look_ahead,
            target.poison,
            lock,
            place,
            threads,
        )

    try:
        # A budget that depends on what the model needs at least is asked for with those numbers.
        return plan(budget(*plan(_UNLIMITED).room()) if callable(budget) else budget)
    except BudgetError as error:
        if streamed or "too small" not in str(error):
            raise
        raise BudgetError(
            f"no tower was found, so nothing of this model can stream; name its lists of repeated blocks with towers=, or "
            f"give memory for all of it: {error}"
        ) from None


def _facts(
    target: Target,
    ownership: Ownership,
    survivors: list[str],
    binding: Binding,
    in_place: list[str],
    shared: list[str],
) -> dict[str, Any]:
    """What attach noticed, for the report."""
    notes = []
    in_files = set(binding.in_files)
    if survivors:
        notes.append(f"old storages still alive, kept by views or caches outside the model: {', '.join(survivors[:8])}")
    if shared:
        notes.append(f"in shared memory before, in ordinary memory from now on: {', '.join(shared[:8])}")
    if ownership.unseen:
        paths = ", ".join(unseen.path for unseen in ownership.unseen[:8])
        notes.append(f"not registered in the module tree, so not managed: {paths}")
    return {
        "device": str(target.device) if not target.emulated else f"host ({target.native.name})",
        "reason": target.reason,
        "model_bytes": ownership.nbytes,
        "towers": {tower.name: len(tower.blocks) for tower in ownership.towers},
        "in_place": [name for name in in_place if name not in in_files],
        "in_files": binding.in_files,
        "survivors": survivors,
        "unregistered": [unseen.path for unseen in ownership.unseen],
        "notes": notes,
        "torch": torch.__version__,
    }


def _lock(pinned_memory: Any) -> int | None:
    """The most that may be page-locked; None leaves it to the machine."""
    if pinned_memory is True:
        return None
    if pinned_memory is False or pinned_memory == 0:
        return 0
    try:
        return parse_bytes(pinned_memory)
    except (BudgetError, TypeError) as error:
        # The reason alone: what it says of a budget is said of this argument here.
        _, _, reason = str(error).rpartition(" cannot be used: ")
        raise BudgetError(
            f"pinned_memory is {pinned_memory!r}: {reason}. Give True, False, or a size such as 8GiB"
        ) from None


def _count(look_ahead: Any) -> int:
    try:
        count = operator.index(look_ahead)
    except TypeError:
        count = -1
    if count < 0 or isinstance(look_ahead, bool):
        raise BudgetError(f"look_ahead is {look_ahead!r}; give a number of units from 0 up, or None")
    return min(count, _MOST_UNITS)
