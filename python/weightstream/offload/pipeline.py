"""`profile` and `all`: sets up every model of a pipeline to run on a device with less memory than they take.

    looked at    models found, hints read, parameters checked        a refusal changes nothing
    prepared     weights converted, blocks marked for the compiler
    planned      every model planned under its budget, reserved RAM shared between them
    attached     one after the other; what fails takes everything back that was set up

Weights that were converted or quantized before a later step failed stay so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Optional

import torch
from torch import nn

from ..adapters.declared import declare
from ..adapters.state import unload
from ..attaching import Place, Prepared
from ..checks import check_model
from ..devices import DeviceArgument, Target, open_target
from ..errors import ModelError, StateError
from ..group import Group
from ..registry import registry
from .amounts import MEGABYTE, budget_of
from .compiling import compile_blocks
from .components import Component, components_of, describe, to_device
from .converting import convert_weights
from .managed import ManagedModel, OffloadObject
from .on_the_fly import check_quantizing, models_to_quantize, quantize_models
from .parameters import Parameters, read_parameters
from .pinning import share_reserve
from .preloads import set_preloading
from .profiles import PROFILES, profile_settings, profile_type
from .progress import LoadingCallback, loading_context
from .verbosity import set_verbosity

__all__ = ["all", "profile"]

log = logging.getLogger("weightstream.offload")

_COMPANY: dict[str, list[str]] = {
    "text_encoder": ["text_encoder_2", "vae"],
    "text_encoder_2": ["text_encoder", "vae"],
}
"""Who accepts whom where no map is given."""
_PIPELINE_CALLS = (
    "to",
    "cuda",
    "cpu",
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
)


def profile(
    pipe_or_dict_of_modules: Any,
    profile_no: int = profile_type.VerylowRAM_LowVRAM,
    verboseLevel: int = -1,
    *,
    device: DeviceArgument = "auto",
    **overrides: Any,
) -> OffloadObject:
    """Sets up the models of a pipeline, or of a dictionary of models by id, by one of the five memory profiles.

    overrides: parameters of `all`, which count before the profile's. device: where models that are in CPU memory go.
    """
    if isinstance(profile_no, bool) or profile_no not in PROFILES:
        known = ", ".join(f"profile_type.{name} ({number})" for number, name in PROFILES.items())
        raise TypeError(f"profile_no is {profile_no!r}; give one of {known}")
    models = components_of(pipe_or_dict_of_modules)
    settings = profile_settings(profile_no, models)
    # What a profile says of models that are not here is no mistake.
    budgets = settings["budgets"]
    settings["budgets"] = {name: value for name, value in budgets.items() if name == "*" or name in models}
    if isinstance(settings["pinnedMemory"], str) and settings["pinnedMemory"] not in models:
        settings["pinnedMemory"] = False
    if "budgets" in overrides:
        settings["preloadExperts"] = True
    settings.update(overrides)
    return _set_up(pipe_or_dict_of_modules, models, settings, verboseLevel, device, PROFILES[profile_no])


def all(  # noqa: A001, the name is mmgp's
    pipe_or_dict_of_modules: Any,
    *,
    device: DeviceArgument = "auto",
    **parameters: Any,
) -> OffloadObject:
    """Sets up the models of a pipeline, or of a dictionary of models by id; see `Parameters` for the parameters.

    All of them is set up or none: what an error, an interrupt or `loading_callback` stops takes back what was done.
    """
    models = components_of(pipe_or_dict_of_modules)
    level = parameters.pop("verboseLevel", -1)
    return _set_up(pipe_or_dict_of_modules, models, parameters, level, device, None)


def _set_up(
    pipe: Any,
    models: Mapping[str, nn.Module],
    given: Mapping[str, Any],
    level: int,
    device: DeviceArgument,
    name: Optional[str],
) -> OffloadObject:
    parameters = read_parameters({**given, "verboseLevel": level}, models)
    set_verbosity(level)
    if name is not None:
        log.debug("profile %s sets %s", name, ", ".join(f"{key}={value!r}" for key, value in given.items()))
    components = [describe(name, model) for name, model in models.items()]
    _check(components)
    quantized = models_to_quantize(parameters, models)
    check_quantizing(quantized, parameters, models)
    callback = parameters.loading_callback
    steps = _Steps(callback, 4 * len(components) + len(quantized))
    done = OffloadObject(parameters)
    with loading_context(callback):
        try:
            _prepare(components, parameters, quantized, steps, done)
            prepared = _plan(components, parameters, device, steps, done)
            sizes = {name: _whole(model) for name, model in prepared.items()}
            _attach(components, prepared, parameters, steps, done)
            company = _company(parameters, models)
            compiled = _named(parameters.compile, list(models))
            set_preloading(components, parameters, company, sizes, compiled, done)
            _refuse_moves(pipe, done)
        except BaseException:
            done.release()
            raise
    return done


def _check(components: list[Component]) -> None:
    """Refuses models that cannot be attached, or that share weights: each has addresses of its own for them."""
    owners: dict[int, tuple[str, str]] = {}
    for component in components:
        check_model(component.model)
        for path, parameter in component.model.named_parameters():
            pointer = _pointer(parameter)
            other, there = owners.setdefault(pointer, (component.name, path)) if pointer else (component.name, path)
            if other != component.name:
                raise ModelError(
                    f"{component.name}.{path} has the weights of {other}.{there}: models that share weights cannot be managed "
                    f"apart; give one of them weights of its own, or leave it out"
                )


def _pointer(parameter: torch.Tensor) -> int:
    """Where its bytes are; 0 for one that has none of its own."""
    try:
        return parameter.data_ptr() if parameter.numel() else 0
    except RuntimeError:
        return 0


def _prepare(
    components: list[Component], parameters: Parameters, quantized: list[str], steps: _Steps, done: OffloadObject
) -> None:
    """What changes weights and forwards before they are placed."""
    compiled = _named(parameters.compile, [component.name for component in components])
    for component in components:
        steps.next("Preparing", component.name)
        convert_weights(component.name, component.model, parameters.convertWeightsFloatTo, steps.poll)
    by_id = {component.name: component.model for component in components}
    quantize_models(by_id, quantized, parameters, lambda name: steps.next("Quantization", name))
    for component in components:
        if component.name in compiled:
            done._undo.append(compile_blocks(component.model, component.towers, parameters.compile_mode))


def _plan(
    components: list[Component], parameters: Parameters, device: DeviceArgument, steps: _Steps, done: OffloadObject
) -> dict[str, Prepared]:
    """Every model planned, those of one device in one group."""
    opened: dict[str, Target] = {}
    targets = {component.name: _target(component, device, opened) for component in components}
    groups: dict[str, Group] = {}
    prepared: dict[str, Prepared] = {}
    company = _company(parameters, targets)
    look_ahead = 0 if not parameters.asyncTransfers else parameters.prefetchWindow
    for component in components:
        steps.next("Scanning Sizes", component.name)
        target = targets[component.name]
        total = target.native.total_memory
        key = f"{target.native.kind}:{target.native.ordinal}"
        if key not in groups:
            there = (other for other in components if targets[other.name] is target)
            largest = max(sum(tensor.nbytes for tensor in other.model.parameters()) for other in there)
            groups[key] = Group(target, largest, int(total * parameters.vram_safety_coefficient))
        budget = budget_of(
            component.name,
            parameters.budgets,
            parameters.workingVRAM,
            total,
            parameters.vram_safety_coefficient,
            component.budget,
        )
        adapt = to_device(target.device, component.dtype)
        place = Place(groups[key], component.name, company[component.name], tuple(component.hooked), adapt)
        model = Prepared(component.model, target, component.towers, budget, look_ahead, None, place)
        raised = model.plan.raised()
        if raised is not None:
            asked, minimum, unit = raised
            log.warning(
                "the budget of %s is raised from %.1f MB to %.1f MB, the smallest that works%s",
                component.name,
                asked / MEGABYTE,
                minimum / MEGABYTE,
                f": what is always resident, and its largest block {unit}" if unit else "",
            )
        prepared[component.name] = model
        done.models[component.name] = ManagedModel(component.name, component.model, groups[key])
    return prepared


def _attach(
    components: list[Component],
    prepared: dict[str, Prepared],
    parameters: Parameters,
    steps: _Steps,
    done: OffloadObject,
) -> None:
    locks, shares = share_reserve(prepared, parameters)
    log.debug("reserved RAM: %s", shares)
    for component in components:
        name = component.name
        managed = done.models[name]
        steps.next("Hooks and LoRA Slots", name)
        receives = name in _named(parameters.loras or False, [])
        managed.undo.append(declare(component.model, name, receives))
        managed.undo.append(partial(unload, component.model))
        model = prepared.pop(name)
        managed.undo.append(_place_buffers(model))
        managed.attachment = model.start(locks[name])
        managed.undo.append(registry.add(component.model, managed.attachment))
        steps.next("Finalization", name)
        report = managed.attachment.report()
        log.info(
            "%s: %.1f MB, of which %.1f MB stay on the device while it runs",
            name,
            report["model_bytes"] / MEGABYTE,
            report["resident_bytes"] / MEGABYTE,
        )


def _whole(model: Prepared) -> int:
    """Device memory in which all of a model is resident, rounding included."""
    _, _, page, everything = model.plan.room()
    return everything + page * (len(model.ownership.towers) + 1)


def _target(component: Component, device: DeviceArgument, opened: dict[str, Target]) -> Target:
    """The device of a model: the one that it is on, or the one for models in CPU memory. One device is opened once."""
    places = {parameter.device for parameter in component.model.parameters()}
    on = [place for place in places if place.type == "cuda"]
    if len(on) > 1:
        raise ModelError(
            f"{component.name} is spread over {', '.join(map(str, on))}; put it on one device or on the CPU"
        )
    key = str(on[0]) if on else "given"
    if key not in opened:
        target = open_target(on[0] if on else device)
        same = (other for other in opened.values() if not other.emulated and other.device == target.device)
        opened[key] = next(same, target)
    if on:
        component.model.to("cpu")
    return opened[key]


def _company(parameters: Parameters, names: Mapping[str, Any]) -> dict[str, Optional[list[str]]]:
    """For each model whom it accepts beside it; None for everyone."""
    given = _COMPANY if parameters.coTenantsMap is None else parameters.coTenantsMap
    company: dict[str, Optional[list[str]]] = {}
    for name in names:
        accepted = given.get(name, ())
        everyone = accepted == "*" or "*" in accepted
        company[name] = None if everyone else [one for one in accepted if one in names]
    return company


def _place_buffers(model: Prepared) -> Callable[[], None]:
    """Puts buffers that are not the engine's on the device, where they stay; gives what takes them back."""
    device = model.target.device
    managed = {id(user.tensor) for owned in model.ownership.tensors for user in owned.users}
    moved: list[torch.Tensor] = []

    def back() -> None:
        for buffer in moved:
            with torch.no_grad():
                buffer.data = buffer.data.to("cpu")

    if device.type != "cpu":
        for buffer in model.model.buffers():
            if id(buffer) not in managed and buffer.device != device:
                with torch.no_grad():
                    buffer.data = buffer.data.to(device)
                moved.append(buffer)
    return back


def _refuse_moves(pipe: Any, done: OffloadObject) -> None:
    """Makes a pipeline's own ways of moving and offloading its models say that they are managed."""
    if isinstance(pipe, Mapping) or not hasattr(pipe, "__dict__"):
        return
    attributes = pipe.__dict__
    for name in _PIPELINE_CALLS:
        if callable(getattr(type(pipe), name, None)) and name not in attributes:
            attributes[name] = _refusal(type(pipe).__name__, name)
            done._undo.append(lambda name=name: attributes.pop(name, None))


def _refusal(kind: str, name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"{kind}.{name} was called, and its models are managed: they come to their device by themselves; call release() of "
            f"the offload object first"
        )

    return refuse


def _named(value: Any, names: list[str]) -> list[str]:
    if isinstance(value, bool):
        return names if value else []
    return [value] if isinstance(value, str) else list(value)


class _Steps:
    """How far setting up is, for whoever watches."""

    def __init__(self, callback: Optional[LoadingCallback], total: int) -> None:
        self._callback = callback
        self._total = max(total, 1)
        self._done = 0

    def next(self, phase: str, name: str) -> None:
        """A phase of one model begins."""
        if self._callback is not None:
            self._callback.report(phase, self._done, self._total, name)
        self._done += 1

    def poll(self) -> None:
        """Lets an abort through."""
        if self._callback is not None:
            self._callback.check_abort()
