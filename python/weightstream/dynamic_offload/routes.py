"""Which way a module is offloaded: the argument, what was said of its component, the environment, the preset, then `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .config import DynamicOffloadConfig
from .presets import component_policy
from .settings import DynamicOffloadSettings, flag

__all__ = ["CONVOLUTION", "DYNAMIC", "GROUP", "NONE", "Choice", "choose", "has_sdnq_layers", "is_sdnq_layer"]

DYNAMIC = "dynamic_offload"
CONVOLUTION = "linear_convolution"
GROUP = "diffusers_group_offload"
NONE = "none"
AUTO = "auto"
_NAMES = {
    AUTO: AUTO,
    **dict.fromkeys(("dynamic_offload", "dynamic", "ddo"), DYNAMIC),
    CONVOLUTION: CONVOLUTION,
    **dict.fromkeys(("diffusers_group_offload", "diffusers", "diffusers_group", "group", "group_offload"), GROUP),
    **dict.fromkeys(("none", "cuda", "standard", "off"), NONE),
}
_OPTIONS = ("offload_type", "use_stream", "record_stream", "low_cpu_mem_usage", "num_blocks_per_group")


@dataclass
class Choice:
    """A route, who chose it, and what was said of group offload by the same."""

    route: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)


def named(route: str, source: str) -> str:
    """A route by any of its names; ValueError for one that there is not."""
    if not isinstance(route, str) or route.strip().lower() not in _NAMES:
        raise ValueError(f"{source}: there is no route {route!r}; there are {', '.join(_NAMES)}")
    return _NAMES[route.strip().lower()]


def prefix(component: str) -> str:
    """A component as names of variables have it."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in component).upper()


def is_sdnq_layer(layer: nn.Module) -> bool:
    """Whether a layer is quantized by SDNQ: by what such a layer has, not by its class."""
    return hasattr(layer, "sdnq_dequantizer") or type(layer._parameters.get("weight")).__name__ == "SDNQTensor"


def has_sdnq_layers(module: nn.Module) -> bool:
    """Whether a layer of the module is quantized by SDNQ."""
    return any(is_sdnq_layer(part) for part in module.modules())


def choose(
    module: nn.Module,
    component: str,
    settings: DynamicOffloadSettings,
    config: DynamicOffloadConfig,
    environ: Mapping[str, str],
    *,
    route: str | None,
    group_offload: bool | None,
    dynamic_offload: bool | None,
    convolutions: bool,
    plain: bool,
) -> Choice:
    """The route of a module. `convolutions`: they shall be offloaded. `plain`: neither a configuration, a field nor a switch was given, so that the preset decides."""
    said = _said(component, settings, environ, plain)
    options = {name: value for policy in reversed(said) for name, value in policy[1].items() if name in _OPTIONS}
    for source, policy in [("route", {} if route is None else {"route": route}), *said]:
        if "route" in policy:
            chosen = named(policy["route"], source)
            if chosen != AUTO:
                return Choice(chosen, source, options)
            break
    return Choice(_automatic(module, config, group_offload, dynamic_offload, convolutions), AUTO, options)


def _said(
    component: str, settings: DynamicOffloadSettings, environ: Mapping[str, str], plain: bool
) -> list[tuple[str, dict[str, Any]]]:
    """What was said of a component, the strongest first."""
    said: list[tuple[str, dict[str, Any]]] = []
    policy = settings.component_policies.get(component)
    if policy is not None:
        wrong = sorted(set(policy) - {"route", *_OPTIONS})
        if wrong:
            raise ValueError(f"component_policies of {component}: there is no option {', '.join(wrong)}")
        said.append((f"component_policies of {component}", dict(policy)))
    for start in ("DDO_", "DDO_RUNNER_"):
        variable = f"{start}{prefix(component)}_"
        found = {}
        for option in ("route", *_OPTIONS):
            name = variable + option.upper()
            if name in environ:
                found[option] = _value(name, option, environ[name])
        if found:
            said.append((f"{variable}ROUTE", found))
    if plain:
        said.append((f"the preset {settings.effective_preset}", component_policy(settings.effective_preset, component)))
    return said


def _value(name: str, option: str, text: str) -> Any:
    if option in ("route", "offload_type"):
        return text
    if option == "num_blocks_per_group":
        if not text.isdigit():
            raise ValueError(f"{name}={text!r} is no whole number")
        return int(text)
    return flag(name, text)


def _automatic(
    module: nn.Module,
    config: DynamicOffloadConfig,
    group_offload: bool | None,
    dynamic_offload: bool | None,
    convolutions: bool,
) -> str:
    if group_offload:
        return GROUP
    dynamic = config.execution_mode != "plan" if dynamic_offload is None else dynamic_offload
    if dynamic and convolutions and config.execution_mode != "plan":
        return CONVOLUTION
    if dynamic and has_sdnq_layers(module):
        # Only the dynamic route has a resident budget, which is what a profile is about.
        return DYNAMIC if config.profile_name.strip() else GROUP
    return DYNAMIC if dynamic and config.execution_mode != "plan" else NONE
