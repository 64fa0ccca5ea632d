"""What models share, while it is managed: on the device as long as one of its models is, within their budgets."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Optional

from ..attaching import Place, Prepared
from ..attachment import Attachment
from ..devices import Target
from ..errors import StateError
from ..group import Group
from ..running import Runtime
from .components import to_device
from .shared import Shared

__all__ = ["SharedPart", "plan_part"]

_SHARE = 2
"""A part streams where it would take more than one in so many bytes of the smallest of its models' budgets."""


class SharedPart:
    """An engine for weights that several models have, with pages and a ring of its own: its blocks run inside theirs."""

    def __init__(self, shared: Shared, group: Group) -> None:
        """Not attached yet."""
        self.shared = shared
        self.group = group
        self.attachment: Optional[Attachment] = None
        self.taken = 0
        """Device memory that it takes at most."""
        self._users: list[weakref.ref[Runtime]] = []

    def joined(self, runtime: Runtime) -> None:
        """A model that has these weights is attached."""
        self._users.append(weakref.ref(runtime))

    def is_here(self) -> bool:
        """Whether it is on the device."""
        return self._runtime.offloader.is_here()

    def come(self) -> None:
        """One of its models came."""
        self._runtime.bring()

    def leave(self, leaving: Collection[Runtime]) -> None:
        """These models leave. It goes with the last."""
        stays = any(user.open or (user.offloader.is_here() and user not in leaving) for user in self.users())
        if not stays and not self._runtime.open and self.is_here():
            self._vacate()

    def vacate(self) -> None:
        """Takes it off the device until it, or one of its models, runs. StateError while one does."""
        users = self.users()
        if any(user.open for user in users):
            raise StateError(f"{self.shared.name} belongs to a model that is running; it stays until that has ended")
        self._vacate()
        for user in users:
            if user.group is not None:
                user.group.running = None  # its next step looks again
                user.shut_doors()

    def users(self) -> list[Runtime]:
        """The models that have these weights, and are attached."""
        return [user for user in (ref() for ref in self._users) if user is not None]

    def _vacate(self) -> None:
        self.group.vacate(self._runtime)
        if self._runtime.preloading is not None:
            self._runtime.preloading.forget()

    @property
    def _runtime(self) -> Runtime:
        assert self.attachment is not None
        return self.attachment._runtime


def plan_part(
    shared: Shared, target: Target, limit: int, budget: int, look_ahead: Optional[int], inner: Collection[SharedPart]
) -> tuple[SharedPart, Prepared]:
    """Plans a part. `limit` is the most that models take of the device; `budget` its own if it is one of the models, else the
    smallest of its models' budgets; `inner` what is apart within it."""
    size = sum(parameter.nbytes for parameter in shared.model.parameters())
    part = SharedPart(shared, Group(target, size, limit))

    def asked(base: int, largest: int, page: int, total: int) -> int:
        whole = (-(-total // page) + 1 + len(shared.towers)) * page
        if shared.of is not None:
            return min(whole, budget)
        share = budget // _SHARE
        return whole if whole <= share else min(whole, max(share, base + 2 * largest + page))

    dtype = None if shared.of is None else shared.of.dtype
    place = Place(
        part.group,
        shared.name,
        [],
        tuple(shared.entries),
        to_device(target.device, dtype),
        lambda tensor: id(tensor) in shared.tensors,
        frozenset(module for other in inner for module in other.shared.modules),
        parts=tuple(inner),
    )
    prepared = Prepared(shared.model, target, shared.towers, asked, look_ahead, None, place)
    raised = prepared.plan.raised()
    base, largest, page, total = prepared.plan.room()
    part.taken = raised[1] if raised is not None else min(asked(base, largest, page, total), limit)
    return part, prepared
