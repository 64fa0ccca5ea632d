"""Computing experts beside the device. It has its names, and is not built yet."""

from __future__ import annotations

from typing import Any

from .errors import NotAvailableError

__all__ = ["SwiGLUExperts"]


class SwiGLUExperts:
    """Routes and computes SwiGLU experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """NotAvailableError: experts are computed by their model, on the device."""
        raise NotAvailableError(
            "expert_compute.SwiGLUExperts is not built yet; models compute their experts themselves"
        )
