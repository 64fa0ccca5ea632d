"""The convolution route: dense convolutions, and the linear layers and embeddings beside them, get their weights on the device for
the time of each call and no longer.

The weights are copied on the current stream into tensors that PyTorch's allocator gives and takes back in stream order. There is
no other stream, no cache, no kernel and no wait. Activations stay where they are, so that the peak need not be lower than with
other ways of offloading.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .calibration import GIB
from .config import DynamicOffloadConfig, checked
from .convolution_calls import Call, Copies
from .convolution_checks import CONVOLUTIONS, preflight
from .linear import compute_device, leaves, pin_budget
from .selecting import select_pinned

__all__ = ["ConvolutionOffload", "configuration", "offload_convolutions"]

_PATIENCE = 100
"""Interrupts that cannot keep a removal from its end."""


def configuration(
    explicit: DynamicOffloadConfig | None, base: DynamicOffloadConfig, overrides: dict[str, Any]
) -> DynamicOffloadConfig:
    """The route's own configuration: the caller's, which must ask for convolutions, or one that no preset's or environment's
    budget reaches."""
    if explicit is not None:
        config = checked(explicit, **overrides)
        if not config.linear_convolution_offload:
            raise ValueError("the route linear_convolution needs a config with linear_convolution_offload=True")
        return config
    own = DynamicOffloadConfig(
        execution_device=base.execution_device,
        offload_device=base.offload_device,
        target_module_classes=base.target_module_classes,
        execution_mode="linear_runtime",
        linear_convolution_offload=True,
        small_tensor_threshold_bytes=base.small_tensor_threshold_bytes,
        pin_cpu_memory=True,
    )
    return checked(own, **overrides)


@dataclasses.dataclass
class _Placed:
    """A tensor that is on the device from set-up to removal, and where it was before."""

    owner: nn.Module
    name: str
    source: Tensor
    is_buffer: bool


class ConvolutionOffload:
    """The route on one module."""

    def __init__(self, module: nn.Module, config: DynamicOffloadConfig, device: torch.device) -> None:
        """Made by `offload_convolutions`, which has checked everything."""
        self.module = module
        self.device = device
        self.calls: list[Call] = []
        self.copies = {"convolution_parameter": Copies(), "linear_parameter": Copies()}
        self.pins = {"calls": 0, "host_seconds": 0.0, "gb": 0.0}
        self._placed: list[_Placed] = []
        self._pin = config.pin_cpu_memory and device.type == "cuda"
        self._removed = False
        convolutions = {id(part): part for part in module.modules() if isinstance(part, CONVOLUTIONS)}
        linear = leaves(module, config).streamed
        others = [leaf for _, leaf in linear if id(leaf) not in convolutions]
        parts = [*((part, True) for part in convolutions.values()), *((leaf, False) for leaf in others)]
        sizes = [sum(weight.nbytes for weight in _weights(part).values()) for part, _ in parts]
        self.pinning = pin_budget(config, sum(sizes))
        chosen = select_pinned(sizes, self.pinning["budget_bytes"], config.pin_weight_selection)
        try:
            for number, (part, is_convolution) in enumerate(parts):
                label = "convolution_parameter" if is_convolution else "linear_parameter"
                self._wrap(part, label, is_convolution, number in chosen)
            self._place()
        except BaseException:
            self._undo()
            raise

    def _wrap(self, part: nn.Module, label: str, strict: bool, lock: bool) -> None:
        weights = _weights(part)
        if self._pin and lock:
            for parameter in weights.values():
                self._page_lock(parameter)
        call = Call(part, weights, self.device, self.copies[label], strict)
        self.calls.append(call)
        call.put_on()

    def _page_lock(self, parameter: nn.Parameter) -> None:
        """Gives a weight page-locked memory; where there is none it streams all the same."""
        start = time.perf_counter()
        try:
            parameter.data = parameter.data.pin_memory()
        except RuntimeError:
            self._pin = False
            return
        self.pins["calls"] += 1
        self.pins["host_seconds"] += time.perf_counter() - start
        self.pins["gb"] += parameter.nbytes / GIB

    def _place(self) -> None:
        """Brings everything else to the device."""
        temporary = {id(p) for call in self.calls for p in call.weights.values()}
        done: dict[int, Tensor] = {}
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or id(parameter) in temporary or id(parameter) in done:
                    continue
                done[id(parameter)] = parameter
                self._placed.append(_Placed(part, name, parameter.data, False))
                parameter.data = parameter.data.to(self.device, copy=True)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    self._placed.append(_Placed(part, name, buffer, True))
                    part._buffers[name] = done.setdefault(id(buffer), buffer.to(self.device, copy=True))

    def remove(self) -> None:
        """Puts forwards and tensors back as they were before. RuntimeError, with nothing changed, while a layer runs."""
        if self._removed:
            return
        running = [call.name for call in self.calls if call.running]
        if running:
            raise RuntimeError(
                f"the offload cannot be removed while a {running[0]} of the module runs; let the call end first"
            )
        self._removed = True
        self._undo()

    def _undo(self) -> None:
        for call in self.calls:
            insist(call.take_off)
        insist(self._bring_back)

    def _bring_back(self) -> None:
        while self._placed:
            placed = self._placed[-1]
            if placed.is_buffer:
                buffer = placed.owner._buffers.get(placed.name)
                # What a forward wrote counts.
                if buffer is not None and buffer.shape == placed.source.shape and not placed.source.is_inference():
                    with torch.no_grad():
                        placed.source.copy_(buffer)
                placed.owner._buffers[placed.name] = placed.source
            else:
                parameter = placed.owner._parameters[placed.name]
                if parameter is not None:
                    parameter.data = placed.source
            self._placed.pop()

    def setup(self) -> dict[str, Any]:
        """What set-up did. The counters of page-locking keep the linear runtime's label, convolutions included."""
        convolutions = [call for call in self.calls if call.strict]
        return {
            "convolutions": len(convolutions),
            "linear_layers": len(self.calls) - len(convolutions),
            "placed_tensors": len(self._placed),
            "pinning": dict(self.pinning),
            "setup_runtime": {"linear_weight_pin": dict(self.pins)},
        }

    def runtime(self) -> dict[str, Any]:
        """What has run."""
        weights = sum(p.nbytes for call in self.calls for p in call.weights.values())
        return {
            "module_count": len(self.calls),
            "patched_module_count": 0 if self._removed else len(self.calls),
            "bytes_by_placement": {"offloaded": weights, "base": sum(p.source.nbytes for p in self._placed)},
            "copy_runtime": {label: copies.as_dict() for label, copies in self.copies.items() if copies.calls},
        }


def _weights(part: nn.Module) -> dict[str, nn.Parameter]:
    """What comes to the device for a call and leaves after it."""
    return {name: parameter for name, parameter in part.named_parameters(recurse=False) if name != "bias"}


def insist(work: Callable[[], None]) -> None:
    """Does what is safe to repeat to its end, and raises an interrupt afterwards."""
    interrupt: KeyboardInterrupt | None = None
    for _ in range(_PATIENCE):
        try:
            work()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def offload_convolutions(module: nn.Module, config: DynamicOffloadConfig) -> ConvolutionOffload:
    """Puts a module on the route; ValueError, before anything is moved, for what it does not take."""
    device = compute_device(config.execution_device)
    preflight(module, config, device)
    return ConvolutionOffload(module, config, device)
