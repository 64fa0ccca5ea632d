"""What a model holds outside its module tree, and who keeps old storages alive: the two things binding cannot reach.

Modules in plain Python lists, and tensors set as plain attributes, are in no `parameters()`; nobody places them, so
they are reported. Storages that outlive binding are reported by the names of the tensors that lay in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .spans import inner_tensors, tensor_bytes

if TYPE_CHECKING:
    from .ownership import Ownership

_DEPTH = 3
"""Levels of plain containers that are looked into."""
_WIDTH = 4096
"""Elements of one container that are looked at: token tables are long and hold no modules."""


@dataclass(frozen=True)
class Unseen:
    """Something with weights that is not in the module tree."""

    path: str
    """How to reach it: ``encoder.projections[1]``."""
    kind: str
    """``"module"``, ``"parameter"`` or ``"tensor"``. The last are often tables that a forward moves by itself."""
    nbytes: int
    """Bytes it holds."""


def find_unseen(model: nn.Module) -> list[Unseen]:
    """Modules, parameters and tensors held by plain attributes and containers of the model's modules."""
    registered = {id(module) for module in model.modules()}
    registered.update(id(tensor) for tensor in model.parameters())
    registered.update(id(tensor) for tensor in model.buffers())
    found: list[Unseen] = []
    for prefix, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for path, item in _walk(f"{prefix}.{name}" if prefix else name, value, _DEPTH):
                if id(item) in registered:
                    continue
                registered.add(id(item))
                nbytes = _weight(item)
                if nbytes:
                    found.append(Unseen(path, _kind(item), nbytes))
    return found


def _walk(path: str, value: object, depth: int) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Modules and tensors at and inside plain containers."""
    if isinstance(value, (nn.Module, Tensor)):
        yield path, value
    elif depth > 0 and isinstance(value, dict):
        for key, item in list(value.items())[:_WIDTH]:
            yield from _walk(f"{path}[{key!r}]", item, depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple, set, frozenset)):
        for number, item in enumerate(list(value)[:_WIDTH]):
            yield from _walk(f"{path}[{number}]", item, depth - 1)


def _weight(item: nn.Module | Tensor) -> int:
    """Bytes of what was found."""
    if isinstance(item, nn.Module):
        return tensor_bytes(item)
    if isinstance(item, nn.parameter.UninitializedTensorMixin):
        return 0
    return sum(leaf.nbytes for _, leaf in inner_tensors(item))


def _kind(item: nn.Module | Tensor) -> str:
    """The word for it."""
    if isinstance(item, nn.Module):
        return "module"
    return "parameter" if isinstance(item, nn.Parameter) else "tensor"


class StorageWatch:
    """Weak references to a model's storages, taken before binding and asked after it."""

    def __init__(self, ownership: Ownership) -> None:
        """Notes the storages without keeping them alive."""
        self._watched: dict[int, tuple[StorageWeakRef, list[str]]] = {}
        for tensor in ownership.tensors:
            for user in tensor.users:
                storage = user.tensor.untyped_storage()
                held = self._watched.setdefault(storage._cdata, (StorageWeakRef(storage), []))
                held[1].append(user.path)

    def survivors(self, held: Sequence[str] = ()) -> list[str]:
        """Names of tensors whose old storage is alive still, except storages of a name in `held`.

        Drop the Ownership first: its users hold the tensors.
        """
        kept = set(held)
        alive = [names for reference, names in self._watched.values() if not reference.expired()]
        return [name for names in alive if kept.isdisjoint(names) for name in names]
