"""Where the tensors of active adapters are: on the device beside the model, block by block with it, or where its weights are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn

from ..attachment import Attachment
from ..checks import MARK
from ..errors import BudgetError
from ..offload.amounts import MEGABYTE
from .adapted import Adapters
from .placing import Placement
from .streaming import Company, block_of, refused

__all__ = ["Settled", "turning_modules"]

log = logging.getLogger("weightstream.offload")


def turning_modules(hosts: Mapping[int, nn.Module]) -> list[nn.Module]:
    """The blocks that adapted modules lie in, and the models of those blocks, where they are attached: turns may open there."""
    found: dict[int, nn.Module] = {}
    for attachment, inside in _by_attachment(hosts).items():
        places = block_of(attachment)
        blocks = {places[id(module)] for module in inside if id(module) in places}
        for index in sorted(blocks):
            module = attachment._ownership.blocks[index].module
            found[id(module)] = module
        if blocks:
            found[id(attachment.model)] = attachment.model
    return list(found.values())


class Beside:
    """Adapters that are on the device as long as their model is."""

    def __init__(self, parts: Sequence[Any], attachment: Attachment) -> None:
        self._parts = parts
        self._device = attachment.device
        self._companions = attachment._runtime.companions
        self._is_here = False
        self.come()
        self._companions.add(self)

    def come(self) -> None:
        """Brings them."""
        if not self._is_here:
            for part in self._parts:
                _place(part, self._device)
            self._is_here = True

    def leave(self) -> None:
        """Takes them off."""
        if not self._is_here:
            return
        self._is_here = False
        for part in self._parts:
            for layer in part.modules():
                if isinstance(layer, Adapters):
                    layer.leave()

    def close(self) -> None:
        """They do not follow the model any more."""
        self._companions.discard(self)


class Settled:
    """The tensors of one set of active adapters in their places."""

    def __init__(self) -> None:
        self._companies: list[tuple[Attachment, Company]] = []
        self._beside: list[tuple[Attachment, Beside]] = []
        self._reserved: list[Attachment] = []
        """Those of whose budgets they take a part."""

    def settle(
        self, placement: Placement, computed: Mapping[int, Any], reserve: tuple[bool, Optional[int]]
    ) -> dict[int, Any]:
        """Brings them there; gives what is computed in each module's forward, by its id. What an error leaves, `leave` undoes."""
        hosts = {host: placement.slots[host].module for host in computed}
        whole = dict(computed)
        attached = _by_attachment(hosts)
        for attachment, modules in attached.items():
            self._settle(attachment, {id(module): computed[id(module)] for module in modules}, reserve, whole)
        managed = {id(module) for modules in attached.values() for module in modules}
        for host, part in computed.items():
            if host not in managed:
                _place(part, _device(hosts[host]))
        return whole

    def leave(self, only: Optional[Attachment] = None) -> None:
        """Takes them from their places; of one model alone if given. What is interrupted is completed by the next call."""
        for held in (self._companies, self._beside):
            for entry in [entry for entry in held if only is None or entry[0] is only]:
                entry[1].close()
                held.remove(entry)
        for attachment in [one for one in self._reserved if only is None or one is only]:
            attachment.reserve(0)
            self._reserved.remove(attachment)

    def _settle(
        self,
        attachment: Attachment,
        computed: dict[int, Any],
        reserve: tuple[bool, Optional[int]],
        whole: dict[int, Any],
    ) -> None:
        nbytes = sum(_nbytes(part) for part in computed.values())
        self._reserved.append(attachment)
        places = block_of(attachment)
        blocks: dict[int, list[Any]] = {}
        outside = []
        for host, part in computed.items():
            blocks.setdefault(places[host], []).append(part) if host in places else outside.append(part)
        try:
            attachment.reserve(nbytes)
        except BudgetError as error:
            if not blocks:
                raise BudgetError(
                    f"the adapters of {type(attachment.model).__name__} need {nbytes} bytes of device memory beside the model, the sum "
                    f"of those of {len(outside)} layers, none of which lies in a block that streams: {error}"
                ) from None
            self._stream(attachment, blocks, outside, reserve, whole, computed)
            return
        self._beside.append((attachment, Beside(list(computed.values()), attachment)))

    def _stream(
        self,
        attachment: Attachment,
        blocks: dict[int, list[Any]],
        outside: list[Any],
        reserve: tuple[bool, Optional[int]],
        whole: dict[int, Any],
        computed: dict[int, Any],
    ) -> None:
        for parts in blocks.values():
            for part in parts:
                _place(part, torch.device("cpu"))
        for slots in (2, 1):
            company = Company(attachment, blocks, reserve, slots)
            apart = sum(map(_nbytes, outside))
            needed = company.nbytes + apart
            try:
                attachment.reserve(needed)
                break
            except BudgetError as error:
                if slots > 1:
                    continue
                if attachment._runtime.group is None:
                    raise refused(attachment, company, apart, error) from None
                log.warning(
                    "%s takes %.1f MB more than its budget for its LoRAs, which it has no room for",
                    type(attachment.model).__name__,
                    needed / MEGABYTE,
                )
        self._beside.append((attachment, Beside(outside, attachment)))
        for parts in blocks.values():
            for part in parts:
                _place(part, attachment.device, moves=False)
        self._companies.append((attachment, company))
        company.start()
        for host, (_, turn) in company.turns(lambda module: computed.get(id(module))).items():
            whole[host] = turn


def _by_attachment(hosts: Mapping[int, nn.Module]) -> dict[Attachment, list[nn.Module]]:
    found: dict[Attachment, list[nn.Module]] = {}
    for module in hosts.values():
        attachment = module.__dict__.get(MARK)
        if attachment is not None:
            found.setdefault(attachment, []).append(module)
    return found


def _nbytes(part: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in part.parameters())


def _place(part: nn.Module, device: Optional[torch.device], moves: bool = True) -> None:
    if device is not None:
        for layer in part.modules():
            if isinstance(layer, Adapters):
                layer.place(device, moves)


def _device(module: nn.Module) -> Optional[torch.device]:
    """Where a layer computes; None if it does not say."""
    parameter = next(module.parameters(), None)
    return None if parameter is None or parameter.device.type == "meta" else parameter.device
