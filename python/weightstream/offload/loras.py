"""LoRAs on the fly: loading them into a model, choosing which are active and how strongly, unloading them.

Every function takes a model, or a part of one that was declared by itself, and follows it to all parts.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union

from torch import nn

from ..adapters.declared import declared_within, name_of
from ..adapters.layers import layers_of
from ..adapters.multipliers import read_multipliers, read_step
from ..adapters.reading import ModelLayers, read_adapter
from ..adapters.state import AdapterSet, LoadedAdapter, ModelAdapters, remember, state_of, unload
from ..errors import LoadingCancelled, ModelError, StateError, WeightsError, WeightstreamError
from .amounts import MEGABYTE
from .progress import progress_of

__all__ = [
    "activate_loras",
    "load_loras_into_model",
    "set_step_no_for_lora",
    "sync_models_loras",
    "unload_loras_from_model",
]

log = logging.getLogger("weightstream.offload")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_one_at_a_time = threading.RLock()
"""Two changes of one model's adapters at once would leave forwards of both."""


def _alone(function: _Function) -> _Function:
    """A function that waits while another changes adapters."""

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time:
            return function(*args, **kwargs)

    return alone  # type: ignore[return-value]


def load_loras_into_model(
    model: nn.Module,
    lora_path: Union[str, os.PathLike[str], Sequence[Any]],
    lora_multi: Any = None,
    activate_all_loras: bool = True,
    check_only: bool = False,
    ignore_model_variations: bool = False,
    pinnedLora: bool = False,
    maxReservedLoras: int = -1,
    split_linear_modules_map: Optional[Mapping[str, Any]] = None,
    preprocess_sd: Any = None,
    verboseLevel: int = -1,
) -> list[str]:
    """Loads LoRA files into a model in the place of those it has, and gives the paths of those that fit.

    The others are in `model._loras_errors`, each with the reason: a file fits whole or is refused whole. Those that fit are named
    "0", "1", … in the order of `lora_path`.

    lora_multi: for each path a number, or a list of numbers with one for each denoising step; 1 where nothing is given.
    activate_all_loras: makes all of them active. Otherwise `activate_loras` does.
    check_only: says which files fit, and changes nothing.
    ignore_model_variations: leaves out what of a file is for layers that the model does not have, or has in other shapes.
    pinnedLora, maxReservedLoras: whether what streams is kept in page-locked memory, and how many MB at most; -1 for no limit.
    split_linear_modules_map: fused layers and the layers that they stand for, as `fused_split_map` of the loading functions.
    preprocess_sd: a function of a file's tensors by their keys that returns others, or rules that rename prefixes.

    StateError if the model was set up without being declared in `loras`. An error, an interrupt or a cancelled
    `LoadingCallback` leaves the model with the LoRAs that it had.
    """
    _check_model("load_loras_into_model", model)
    _check_reserve(pinnedLora, maxReservedLoras)
    _check_flags(activate_all_loras, check_only, ignore_model_variations)
    parts = declared_within(model)
    paths = _listed(lora_path)
    multipliers = read_multipliers(lora_multi, len(paths))
    layers = list(layers_of(model, parts))
    described = ModelLayers(layers)
    loaded: list[LoadedAdapter] = []
    accepted: list[int] = []
    errors: list[tuple[str, str]] = []
    progress = progress_of([os.fspath(path) for path in paths if isinstance(path, (str, os.PathLike))])
    try:
        for number, path in enumerate(paths):
            progress.phase("Loading LoRAs", number, len(paths))
            try:
                adapter = read_adapter(
                    path,
                    described,
                    component=name_of(model),
                    split=split_linear_modules_map,
                    preprocess_sd=preprocess_sd,
                    ignore_variations=ignore_model_variations,
                    progress=progress,
                    poll=progress.poll,
                )
            except LoadingCancelled:
                raise
            except (WeightstreamError, OSError) as error:
                errors.append((_text(path), str(error)))
                log.warning("LoRA %s is not loaded: %s", _text(path), error)
                continue
            loaded.append(adapter)
            accepted.append(number)
        progress.phase("LoRAs Loaded", len(paths), max(len(paths), 1))
        for adapter in loaded:
            for note in adapter.warnings:
                log.warning("LoRA %s: %s", adapter.path, note)
            for note in adapter.notes:
                log.info("LoRA %s: %s", adapter.path, note)
        fitting = [paths[number] for number in accepted]
        if not check_only:
            chosen = AdapterSet(loaded)
            chosen.reserve = (bool(pinnedLora), None if maxReservedLoras < 0 else int(maxReservedLoras * MEGABYTE))
            if activate_all_loras:
                chosen.active = list(range(len(loaded)))
                chosen.multipliers = [multipliers[number] for number in accepted]
            with _one_at_a_time:
                _put(model, parts, described, chosen)
    finally:
        progress.close()
    model._loras_errors = errors
    return fitting


@_alone
def activate_loras(model: nn.Module, lora_nos: Sequence[Any], lora_multi: Any = None) -> None:
    """Makes the LoRAs of these numbers the active ones, with their multipliers; all others of the model are not. The step
    begins at 0."""
    state = _state("activate_loras", model)
    given = [lora_nos] if isinstance(lora_nos, (str, int)) else lora_nos
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise TypeError(f"lora_nos is {lora_nos!r}; give a list of numbers, such as [0, 1]")
    given = list(given)
    count = 0 if state is None else len(state.set.loaded)
    numbers = [_number(one, count) for one in given]
    if len(set(numbers)) != len(numbers):
        raise WeightsError(f"lora_nos is {lora_nos!r}, which names a LoRA twice")
    multipliers = read_multipliers(lora_multi, len(numbers))
    if state is not None:
        state.set.activate(numbers, multipliers)


@_alone
def set_step_no_for_lora(model: nn.Module, step_no: int) -> None:
    """Takes the multipliers of a denoising step, from the next forward on. A list that is shorter keeps its last value."""
    step = read_step(step_no)
    state = _state("set_step_no_for_lora", model)
    if state is not None:
        state.set_step(step)


@_alone
def unload_loras_from_model(model: nn.Module) -> None:
    """Takes all LoRAs off a model: its forwards are what they were."""
    _check_model("unload_loras_from_model", model)
    unload(model)


@_alone
def sync_models_loras(model: nn.Module, model2: nn.Module) -> None:
    """Makes `model2`, of the same architecture, use the LoRAs of `model`: the same tensors in host memory, the same ones active,
    the same multipliers, now and when they are activated anew. The step of each is its own."""
    state = _state("sync_models_loras", model)
    _check_model("sync_models_loras", model2)
    if model is model2:
        raise StateError("sync_models_loras was given the same model twice")
    chosen = AdapterSet([]) if state is None else state.set
    parts = declared_within(model2)
    described = ModelLayers(list(layers_of(model2, parts)))
    needed = {name: piece for adapter in chosen.loaded for name, piece in adapter.pieces.items()}
    for name in needed:
        own = described.by_name.get(name)
        theirs = state.layers[name] if state is not None else None
        if own is None or theirs is None or own.shape != theirs.shape or own.kind != theirs.kind:
            shape = "no such layer" if own is None else f"shape {list(own.shape)}"
            raise WeightsError(
                f"the models are not of one architecture: {name} is adapted in one, and the other has {shape}"
            )
    _put(model2, parts, described, chosen)


def _put(model: nn.Module, parts: Optional[list[nn.Module]], described: ModelLayers, chosen: AdapterSet) -> None:
    """Makes a model use a set of adapters."""
    state = state_of(model)
    if state is None or state.model() is not model:
        if state is not None:
            raise StateError(
                f"this {type(model).__name__} is part of a {type(state.model()).__name__} that has LoRAs; unload those first"
            )
        if not chosen.loaded:
            return
        state = ModelAdapters(model, described.by_name, parts or ())
        for part in model.modules():
            other = state_of(part) if part is not model else None
            if other is not None and other.model() is part:
                raise StateError(f"a {type(part).__name__} inside this model has LoRAs of its own; unload those first")
        state.replace(chosen)
        remember(state)
        return
    state.update_layers(described.by_name)
    state.replace(chosen)


def _state(what: str, model: Any) -> Optional[ModelAdapters]:
    _check_model(what, model)
    return state_of(model)


def _check_model(what: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"{what} takes a torch.nn.Module, not a {type(model).__name__}")


def _listed(given: Any) -> list[Any]:
    """Paths, or what stands for files, one an adapter."""
    if isinstance(given, (str, os.PathLike, Mapping)):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"lora_path is {given!r}; give a path, or a list of paths")
    return list(given)


def _check_flags(activate: Any, check: Any, variations: Any) -> None:
    named = {"activate_all_loras": activate, "check_only": check, "ignore_model_variations": variations}
    for name, value in named.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; give True or False")


def _check_reserve(pinned: Any, most: Any) -> None:
    if not isinstance(pinned, bool):
        raise TypeError(f"pinnedLora is {pinned!r}; give True or False")
    if isinstance(most, bool) or not isinstance(most, (int, float)) or most < -1:
        raise TypeError(f"maxReservedLoras is {most!r}; give a number of MB, or -1 for no limit")


def _number(given: Any, count: int) -> int:
    """A LoRA's number, also as its name."""
    text = str(given)
    number = int(text) if text.isdecimal() else -1
    if isinstance(given, bool) or not 0 <= number < count:
        there = f"there are {count}, named 0 to {count - 1}" if count else "the model has none"
        raise WeightsError(f"lora_nos names {given!r}, and {there}")
    return number


def _text(path: Any) -> str:
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else f"the given {type(path).__name__}"
