"""Puts weights into a model. Either all of it happens or none: what fails or is cancelled puts every old tensor back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..levels import levels_outside
from ..quant.module import QuantModule
from ..quant_router.merging import Foreign
from .dtypes import Converter, DtypeRules
from .progress import Progress
from .quantized import Entry
from .quantizing import carry_out, plan_quantization
from .replacing import replace_layers

__all__ = ["apply", "expected_names"]

_SHOWN = 8
"""Names listed in an error."""


def expected_names(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: parameters under all their names, and persistent buffers."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        packed = isinstance(module, QuantModule)
        if packed:
            found[start + "weight"] = module.weight
        for name, parameter in module._parameters.items():
            if parameter is not None and not (packed and name.startswith("quant_")):
                found[start + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[start + name] = buffer
    return found


def apply(
    model: nn.Module,
    source: str,
    sd: dict[str, Entry],
    rules: DtypeRules,
    *,
    foreign: Mapping[str, Foreign],
    ignore_unused: bool,
    ignore_missing: bool,
    progress: Progress,
    quantization: Optional[tuple[Any, Any]] = None,
) -> list[str]:
    """Assigns the weights of `sd` to the model, ties and types as they have to be, and says so. Empties `sd`.

    `quantization` is a type and what to leave out, if the model shall be quantized. Returns what a user may want to know. WeightsError, with nothing changed, for weights that the model lacks, that the file lacks or that have another shape.
    """
    before = _parameters(model)
    ties = _ties(model)
    with _undone_on_error(model):
        done, unfit, after = replace_layers(model, sd, foreign, ties, rules)
        try:
            missing, unused = nn.Module.load_state_dict(model, sd, strict=False, assign=True)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            raise WeightsError(f"{source} does not fit {type(model).__name__}: {'; '.join(lines[:_SHOWN])}") from None
        unused = sorted({*unused, *unfit})
        missing = [name for name in missing if name not in done]
        if unused and not ignore_unused:
            raise WeightsError(
                f"{source} has {len(unused)} weights that {type(model).__name__} does not use: {_listed(unused)}; "
                f"ignore_unused_weights=True leaves them out"
            )
        missing = _tie(model, ties, set(sd).difference(unused), list(missing))
        sd.clear()
        if missing and not ignore_missing:
            raise WeightsError(
                f"{source} lacks {len(missing)} weights of {type(model).__name__}: {_listed(missing)}; "
                f"ignore_missing_keys=True keeps the model's own"
            )
        for hook in after:
            hook()
        _check_filled(model)
        _keep_attributes(model, before)
        plan = None if quantization is None else plan_quantization(model, *quantization)
        # What will be quantized is converted on the way, some rows at a time.
        notes = _convert(model, rules, progress, set() if plan is None else plan.layers)
        if plan is not None:
            carry_out(model, plan, progress, lambda module, weight: rules.target(module, weight.__dict__, weight.dtype))
            notes += plan.notes
        # Inside: who aborts on hearing this gets the model as it was, too.
        progress.phase("Weights Loaded", 3, 3)
    return notes


@contextmanager
def _undone_on_error(model: nn.Module) -> Iterator[None]:
    """Puts every registered tensor back if the block raises."""
    kept = [
        (held, dict(held))
        for module in model.modules()
        for held in (module._parameters, module._buffers, module._modules)
    ]
    grad = [(p, p.requires_grad) for _, entries in kept for p in entries.values() if isinstance(p, nn.Parameter)]
    try:
        yield
    except BaseException:
        for held, entries in kept:
            held.clear()
            held.update(entries)
        for parameter, requires_grad in grad:
            parameter.requires_grad_(requires_grad)
        raise


def _parameters(model: nn.Module) -> dict[tuple[int, str], dict[str, Any]]:
    """The attributes of each parameter, by the module and name under which it is registered: they outlive it."""
    return {
        (id(module), name): dict(parameter.__dict__)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _ties(model: nn.Module) -> list[dict[str, tuple[nn.Module, str]]]:
    """Names that stand for one parameter, each with its place."""
    groups: dict[int, dict[str, tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                groups.setdefault(id(parameter), {})[f"{prefix}.{name}" if prefix else name] = (module, name)
    return [places for places in groups.values() if len(places) > 1]


def _tie(
    model: nn.Module, ties: list[dict[str, tuple[nn.Module, str]]], given: set[str], missing: list[str]
) -> list[str]:
    """Makes one parameter again of those that were one; returns what is missing still."""
    for places in ties:
        first = next((place for name, place in places.items() if name in given), None)
        if first is None:
            continue
        parameter = first[0]._parameters[first[1]]
        for module, name in places.values():
            module._parameters[name] = parameter
        missing = [name for name in missing if name not in places]
    if missing and getattr(model, "_tied_weights_keys", None) and callable(getattr(model, "tie_weights", None)):
        model.tie_weights()
        present = expected_names(model)
        missing = [name for name in missing if name not in present or present[name].is_meta]
    return missing


def _check_filled(model: nn.Module) -> None:
    """Refuses a model of which something has no data still."""
    for kind, entries in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        empty = [name for name, tensor in entries if tensor.is_meta]
        if empty:
            hint = (
                "" if kind == "parameter" else "; build it with real buffers, only parameters may be on the meta device"
            )
            raise WeightsError(f"{len(empty)} {kind}s of {type(model).__name__} have no data: {_listed(empty)}{hint}")


def _keep_attributes(model: nn.Module, before: dict[tuple[int, str], dict[str, Any]]) -> None:
    """Gives parameters what those in their places had."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                for key, value in before.get((id(module), name), {}).items():
                    parameter.__dict__.setdefault(key, value)


def _convert(model: nn.Module, rules: DtypeRules, progress: Progress, without: set[str]) -> list[str]:
    """Gives every parameter its type, but for the weights of some layers. What shared bytes shares them still. Says what did not
    fit its type."""
    groups: dict[Any, list[tuple[str, nn.Module, str, nn.Parameter]]] = {}
    targets: dict[int, torch.dtype] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (name == "weight" and prefix in without):
                continue
            # A tied parameter has one type: that of its first place.
            target = targets.setdefault(id(parameter), rules.target(module, parameter.__dict__, parameter.dtype))
            if target != parameter.dtype:
                path = f"{prefix}.{name}" if prefix else name
                groups.setdefault((_bytes_of(parameter), target), []).append((path, module, name, parameter))
    convert = Converter(progress.poll, sum(members[0][3].nbytes for members in groups.values()))
    while groups:
        (_, target), members = groups.popitem()
        data = convert(members[0][0], members[0][3].detach(), target)
        made: dict[int, nn.Parameter] = {}
        for _, module, name, parameter in members:
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
            module._parameters[name] = made[id(parameter)]
        del members
    if not convert.overflows:
        return []
    count = sum(convert.overflows.values())
    note = (
        f"{count} values of {_listed(list(convert.overflows))} are too large for float16 and became infinite; "
        f"default_dtype=torch.bfloat16 holds them"
    )
    warnings.warn(note, stacklevel=levels_outside())
    return [note]


def _bytes_of(tensor: Tensor) -> Any:
    """Equal for tensors that show the same bytes in the same way."""
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _listed(names: list[str], shown: int = _SHOWN) -> str:
    listed = ", ".join(names[:shown])
    return f"{listed} and {len(names) - shown} more" if len(names) > shown else listed
