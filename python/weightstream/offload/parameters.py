"""The parameters of `offload.all`: their names, defaults and types. What is wrong is refused with the nearest right name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Optional, Union

import torch

from ..errors import ModelError
from .amounts import check_amounts
from .nearest import nearest
from .progress import LoadingCallback
from .qtypes import kind_of, qint8

__all__ = ["Parameters", "check_names", "read_parameters"]


@dataclass
class Parameters:
    """What `all` may be told, with its defaults. See `docs/python.md`."""

    pinnedMemory: Union[bool, str, list[str]] = False
    partialPinning: bool = False
    pinnedPEFTLora: bool = False
    perc_reserved_mem_max: float = 0
    smartPinning: Optional[int] = None
    quantizeTransformer: bool = True
    extraModelsToQuantize: Union[None, str, list[str]] = None
    quantizationType: Any = qint8
    convertWeightsFloatTo: Optional[torch.dtype] = torch.bfloat16
    budgets: Any = 0
    workingVRAM: Any = None
    vram_safety_coefficient: float = 0.85
    asyncTransfers: bool = True
    prefetchWindow: Optional[int] = None
    autoPreload: Any = False
    loras: Union[None, str, list[str]] = None
    coTenantsMap: Optional[Mapping[str, Any]] = None
    compile: Union[bool, str, list[str]] = False
    compile_mode: str = "default"
    loading_callback: Optional[LoadingCallback] = None
    preloadExperts: bool = True
    verboseLevel: int = -1


_DEFAULT_FOR_NONE = ("pinnedMemory", "quantizationType", "compile", "compile_mode")
"""Applications pass None on where they were given nothing."""
_IDS = ("pinnedMemory", "extraModelsToQuantize", "loras", "compile")
_BESIDE = ("device", "profile_no", "pipe_or_dict_of_modules")
"""Parameters of `profile` and `all` beside these."""
_MANY = (1 << 31) - 1
"""Blocks: more is as good as all of them."""
_BOOLS = ("partialPinning", "pinnedPEFTLora", "quantizeTransformer", "asyncTransfers", "preloadExperts")


def read_parameters(given: Mapping[str, Any], ids: Collection[str]) -> Parameters:
    """The parameters with what was given; TypeError, ModelError or BudgetError, naming it, for what none of them takes."""
    known = [field.name for field in fields(Parameters)]
    for name in given:
        if name not in known:
            raise TypeError(f"there is no parameter {name!r}{nearest(name, [*known, *_BESIDE])}")
    read = Parameters(**given)
    for name in _DEFAULT_FOR_NONE:
        if getattr(read, name) is None:
            setattr(read, name, getattr(Parameters, name))
    for name in _BOOLS:
        _expect(name, getattr(read, name), isinstance(getattr(read, name), bool), "True or False")
    for name in _IDS:
        _check_ids(name, getattr(read, name), ids)
    _check_numbers(read)
    for name in ("budgets", "workingVRAM"):
        check_amounts(name, getattr(read, name), ids)
        if isinstance(getattr(read, name), Mapping):
            check_names(name, getattr(read, name), {*ids, "*"})
    _check_map(read.coTenantsMap, ids)
    dtype = read.convertWeightsFloatTo
    is_float = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    _expect("convertWeightsFloatTo", dtype, is_float, "a floating-point dtype or None")
    _check_mode(read.compile_mode)
    kind_of(read.quantizationType)
    callback = read.loading_callback
    is_callback = callback is None or isinstance(callback, LoadingCallback)
    _expect("loading_callback", callback, is_callback, "an offload.LoadingCallback or None")
    _expect("autoPreload", read.autoPreload, isinstance(read.autoPreload, (bool, dict)), "True, False or a dictionary")
    return read


def _check_mode(mode: Any) -> None:
    """TypeError for a mode that PyTorch's compiler would refuse, long after, in the first forward."""
    _expect("compile_mode", mode, isinstance(mode, str), "a mode of torch.compile")
    if mode == "default":
        return
    from torch._inductor import list_mode_options

    known = [*list_mode_options()]
    near = nearest(mode, known)
    _expect("compile_mode", mode, mode in known, f"a mode of torch.compile, one of {', '.join(known)}{near}")


def check_names(what: str, names: Collection[str], ids: Collection[str]) -> None:
    """ModelError for a name that is no model's."""
    for name in names:
        if name not in ids:
            there = ", ".join(sorted(ids)) or "none"
            raise ModelError(f"{what} names {name!r}, which is no model here{nearest(name, ids)}; there are {there}")


def _check_ids(name: str, value: Any, ids: Collection[str]) -> None:
    if value is None or isinstance(value, bool):
        _expect(name, value, value is not True or name in ("pinnedMemory", "compile"), "a model id or a list of them")
        return
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, (list, tuple, set)) and all(isinstance(one, str) for one in names)
    _expect(name, value, is_list, "a model id or a list of them")
    check_names(name, names, ids)


def _check_numbers(read: Parameters) -> None:
    def is_int(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool)

    def is_number(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    for name in ("smartPinning", "prefetchWindow"):
        value = getattr(read, name)
        _expect(name, value, value is None or (is_int(value) and value >= 0), "a number from 0 up, or None")
        if value is not None:
            setattr(read, name, min(int(value), _MANY))
    share = read.perc_reserved_mem_max
    _expect("perc_reserved_mem_max", share, is_number(share) and 0 <= share <= 1, "a fraction from 0 to 1, such as 0.4")
    share = read.vram_safety_coefficient
    _expect("vram_safety_coefficient", share, is_number(share) and 0 < share <= 1, "a fraction above 0, such as 0.85")
    level = read.verboseLevel
    _expect("verboseLevel", level, is_int(level) and -1 <= level <= 2, "0, 1 or 2")


def _check_map(tenants: Any, ids: Collection[str]) -> None:
    if tenants is None:
        return
    _expect("coTenantsMap", tenants, isinstance(tenants, Mapping), "a dictionary of model ids")
    check_names("coTenantsMap", tenants, ids)
    for name, company in tenants.items():
        is_list = company == "*" or (
            isinstance(company, (list, tuple, set)) and all(isinstance(one, str) for one in company)
        )
        _expect(f"coTenantsMap[{name!r}]", company, is_list, "a list of model ids, or '*'")
        if company != "*":
            check_names(f"coTenantsMap[{name!r}]", company, {*ids, "*"})


def _expect(name: str, value: Any, right: bool, what: str) -> None:
    if not right:
        raise TypeError(f"{name} is {value!r}; give {what}")
