"""One layer's calls on the convolution route: weights onto the device, the layer's own forward, weights back."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .calibration import GIB

__all__ = ["Call", "Copies"]


class Copies:
    """What was copied."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.calls = 0
        self.seconds = 0.0
        self.bytes = 0

    def as_dict(self) -> dict[str, Any]:
        """The counters, under DDO's names."""
        return {"calls": self.calls, "host_seconds": self.seconds, "gb": self.bytes / GIB}


class Call:
    """A layer whose weights are on the device while it runs."""

    def __init__(
        self, layer: nn.Module, weights: dict[str, nn.Parameter], device: torch.device, copies: Copies, strict: bool
    ) -> None:
        """Of a layer that is not wrapped yet. `strict` refuses what only convolutions are asked not to do."""
        self.name = type(layer).__name__
        self.layer = layer
        self.weights = weights
        self.strict = strict
        self.running = False
        self._device = device
        self._copies = copies
        self._lock = threading.Lock()
        self._sources: list[tuple[nn.Parameter, Tensor]] = []
        self._own = layer.__dict__.get("forward")
        self._forward = layer.forward

    def put_on(self) -> None:
        """Puts the call in the place of the layer's forward."""
        forward = self._forward

        @functools.wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        self.layer.__dict__["forward"] = offloaded

    def take_off(self) -> None:
        """Leaves the layer as it was. May be repeated."""
        if self._own is None:
            self.layer.__dict__.pop("forward", None)
        else:
            self.layer.__dict__["forward"] = self._own
        self._put_back()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(args, kwargs)
        with self._lock:
            if self.running:
                raise RuntimeError(
                    f"a {self.name} was called while it runs; its weights are on the device for one call at a time"
                )
            self.running = True
        try:
            temporaries = self._bring()
            output = self._forward(*args, **kwargs)
            if self.strict:
                self._check_after(temporaries, output)
            return output
        finally:
            self._finish()

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(f"a {self.name} on the convolution route cannot be compiled")
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a {self.name} on the convolution route cannot be captured in a CUDA graph")
        if self.strict and self.layer.training:
            raise RuntimeError(f"a {self.name} on the convolution route is in training mode; call eval()")
        if self.strict and not torch.is_inference_mode_enabled():
            raise RuntimeError(f"a {self.name} on the convolution route runs in torch.inference_mode() only")
        if not self.strict and torch.is_grad_enabled():
            raise RuntimeError(f"a {self.name} on the convolution route runs without gradients only")
        given = args[0] if args else kwargs.get("input", kwargs.get("x"))
        if not isinstance(given, Tensor):
            raise ValueError(f"the input of a {self.name} is a {type(given).__name__}, not a tensor")
        if given.device != self._device:
            raise ValueError(
                f"the input of a {self.name} is on {given.device}, and it computes on {self._device}; send inputs there first"
            )

    def _bring(self) -> list[tuple[Tensor, int]]:
        """The weights in tensors on the device, which the parameters show from now on."""
        start = time.perf_counter()
        temporaries = []
        # Outside inference mode, so that a change of them is seen.
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.weights.values():
                source = parameter.data
                temporary = source.to(self._device, non_blocking=True, copy=True)
                self._sources.append((parameter, source))
                parameter.data = temporary
                temporaries.append((temporary, parameter._version))
                self._copies.bytes += source.nbytes
        self._copies.calls += 1
        self._copies.seconds += time.perf_counter() - start
        return temporaries

    def _check_after(self, temporaries: list[tuple[Tensor, int]], output: Any) -> None:
        own = {temporary.untyped_storage().data_ptr() for temporary, _ in temporaries}
        if any(tensor.untyped_storage().data_ptr() in own for tensor in _tensors(output) if tensor.numel()):
            raise RuntimeError(
                f"a {self.name} returned its own weight, which is not on the device after the call; return a copy"
            )
        for parameter, (_, version) in zip(self.weights.values(), temporaries):
            if parameter._version != version:
                raise RuntimeError(f"a {self.name} changed its weight in its forward, and the change is lost")

    def _finish(self) -> None:
        """Ends a call, however often it is interrupted."""
        interrupt = None
        while True:
            try:
                self._put_back()
                self.running = False
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _put_back(self) -> None:
        with torch.inference_mode(False):
            while self._sources:
                parameter, source = self._sources[-1]
                parameter.data = source
                self._sources.pop()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a forward's output."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for item in vars(value).values():
            yield from _tensors(item)
