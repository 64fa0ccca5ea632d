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
from numbers import Integral
from typing import Any, Optional

import torch
from torch import nn

from ..adapters.declared import declare
from ..adapters.state import unload
from ..attaching import Prepared
from ..checks import MARK, check_model
from ..devices import DeviceArgument
from ..errors import ModelError, StateError
from ..registry import registry
from .amounts import MEGABYTE
from .compiling import compile_blocks
from .components import Component, components_of, describe
from .converting import Conversion
from .managed import OffloadObject
from .on_the_fly import check_quantizing, models_to_quantize, quantize_models
from .parameters import Parameters, read_parameters
from .pinning import check_share, share_reserve
from .planning import Planned, company_of, open_targets, plan_models
from .preloads import set_preloading
from .profiles import PROFILES, profile_settings, profile_type
from .progress import LoadingCallback, loading_context
from .shared import Shared, find_shared
from .verbosity import set_verbosity

__all__ = ["all", "profile"]

log = logging.getLogger("weightstream.offload")

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
    if not isinstance(profile_no, Integral) or isinstance(profile_no, bool) or profile_no not in PROFILES:
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
    for component in components:
        _check(component)
    shared = find_shared(components)
    conversion = Conversion(components, parameters.convertWeightsFloatTo)
    quantized = models_to_quantize(parameters, models)
    check_quantizing(quantized, parameters, models)
    check_share(parameters)
    targets = open_targets(components, device)
    callback = parameters.loading_callback
    steps = _Steps(callback, 4 * len(components) + len(quantized))
    done = OffloadObject(parameters)
    try:
        with loading_context(callback):
            _prepare(components, parameters, conversion, quantized, shared, steps, done)
            planned = plan_models(components, targets, parameters, lambda name: steps.next("Scanning Sizes", name))
            done.note(planned, models)
            sizes = {one.managed.name: one.whole for one in planned}
            _attach(planned, parameters, steps)
            compiled = _named(parameters.compile, list(models))
            set_preloading(components, parameters, company_of(parameters, models), sizes, compiled, done)
            _refuse_moves(pipe, done)
            steps.finish()
        return done
    except BaseException:
        done.release()
        raise


def _check(component: Component) -> None:
    """Refuses a model that cannot be attached, by its id."""
    name, model = component.name, component.model
    if any(MARK in module.__dict__ for module in model.modules()):
        raise StateError(
            f"{name} is already attached, or a part of it is: call release() of the offload object that manages it, or detach() of its "
            f"attachment, first; what another pipeline manages is left out where _mmgp_ignore_models of this one names it"
        )
    try:
        check_model(model, anywhere=True)
    except (ModelError, StateError) as error:
        raise type(error)(f"{name}: {error}") from None


def _prepare(
    components: list[Component],
    parameters: Parameters,
    conversion: Conversion,
    quantized: list[str],
    shared: list[Shared],
    steps: _Steps,
    done: OffloadObject,
) -> None:
    """What changes weights and forwards before they are placed."""
    compiled = _named(parameters.compile, [component.name for component in components])
    elsewhere = [component.model for component in components if _is_elsewhere(component.model)]
    if elsewhere:
        for model in elsewhere:
            model.to("cpu")
        conversion = Conversion(components, parameters.convertWeightsFloatTo)  # the bytes are others
    for component in components:
        steps.next("Preparing", component.name)
        conversion.convert(component.name, steps.poll)
    by_id = {component.name: component.model for component in components}
    # What several models have stays what it is for the others, as tied weights do for other layers.
    left_out = {component.name: _paths(component, shared) for component in components}
    quantize_models(by_id, quantized, parameters, left_out, lambda name: steps.next("Quantization", name))
    for component in components:
        if component.name in compiled:
            compile_blocks(component.model, component.towers, parameters.compile_mode, done._undo)


def _is_elsewhere(model: nn.Module) -> bool:
    return any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers()))


def _paths(component: Component, shared: list[Shared]) -> list[str]:
    """The modules of a model that hold weights of others, unless it is what lies in them."""
    theirs = {id(module) for part in shared for module in part.loose.get(component.name, ())}
    for part in shared:
        if component.name in part.names and part.of is not component:
            theirs |= part.modules
    return [path for path, module in component.model.named_modules() if id(module) in theirs]


def _attach(planned: list[Planned], parameters: Parameters, steps: _Steps) -> None:
    locks, shares = share_reserve(planned, parameters)
    log.debug("reserved RAM: %s", shares)
    while planned:
        one = planned.pop(0)  # its plan goes as soon as it is carried out
        managed, name = one.managed, one.managed.name
        if one.component is not None:
            steps.next("Hooks and LoRA Slots", name)
            receives = name in _named(parameters.loras or False, [])
            managed.undo.append(declare(managed.model, name, receives))
            managed.undo.append(partial(unload, managed.model))
        managed.undo.append(_place_buffers(one.prepared))
        managed.attachment = one.prepared.start(locks[name])
        managed.attachment.apart = managed.apart
        if one.part is not None:
            one.part.attachment = managed.attachment
        if one.component is not None:
            managed.undo.append(registry.add(managed.model, managed.attachment))
            steps.next("Finalization", name)
        report = managed.attachment.report()
        log.info(
            "%s: %.1f MB, of which %.1f MB stay on the device while it runs",
            name,
            report["model_bytes"] / MEGABYTE,
            report["resident_bytes"] / MEGABYTE,
        )


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
        self._done, self._last = 0, ""

    def next(self, phase: str, name: str) -> None:
        """A phase of one model begins."""
        if self._callback is not None:
            self._callback.report(phase, self._done, self._total, name)
        self._done, self._last = self._done + 1, name

    def finish(self) -> None:
        """All of it is done."""
        if self._callback is not None:
            self._callback.report("Finalization", self._total, self._total, self._last)

    def poll(self) -> None:
        """Lets an abort through."""
        if self._callback is not None:
            self._callback.check_abort()
