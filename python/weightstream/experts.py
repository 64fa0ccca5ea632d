"""Experts of mixture models, each placed for itself. They have their names, and are not built yet."""

from __future__ import annotations

from typing import Any

from .errors import NotAvailableError

__all__ = ["ExpertBank"]


class ExpertBank:
    """The experts of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """NotAvailableError: experts stream with their blocks."""
        raise NotAvailableError(
            "experts.ExpertBank is not built yet; experts that are parameters of a block stream with it"
        )
