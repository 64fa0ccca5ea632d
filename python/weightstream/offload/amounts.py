"""How much device memory each model may take, from budgets as people write them: megabytes, percentages, dictionaries.

Pure. A megabyte is 2^20 bytes here, as in mmgp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Optional

from ..errors import BudgetError

__all__ = ["MEGABYTE", "amount", "budget_of", "check_amounts"]

MEGABYTE = 1 << 20
_PERCENTAGE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$", re.ASCII)


def check_amounts(name: str, value: Any, ids: Any) -> None:
    """BudgetError if `value` is no amount and no dictionary of amounts by model."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise BudgetError(f"{name} has the key {key!r}: its keys are model ids and '*'")
            amount(f"{name}[{key!r}]", one, 1)
    elif value is not None:
        amount(name, value, 1)


def amount(name: str, value: Any, total: int) -> int:
    """The bytes in a number of megabytes or a percentage of `total`; 0 for 0."""
    if isinstance(value, str):
        match = _PERCENTAGE.match(value)
        if match is None or not 0 < float(match[1]) <= 100:
            raise BudgetError(
                f"{name} is {value!r}: a text is a percentage of the device's memory, above 0% and up to 100%, such as "
                f'"80%"; a number is in megabytes'
            )
        return max(int(total * float(match[1]) / 100), 1)
    whole = isinstance(value, Integral)
    right = isinstance(value, Real) and not isinstance(value, bool) and (whole or math.isfinite(value)) and value >= 0
    if not right:
        raise BudgetError(
            f"{name} is {value!r}: give a number of megabytes from 0 up, 0 for no limit, or a percentage of the device's memory "
            f'such as "80%"'
        )
    return int(value) * MEGABYTE if whole else int(float(value) * MEGABYTE)


def budget_of(
    model_id: str, budgets: Any, working: Any, total: int, coefficient: float, own: Optional[int] = None
) -> int:
    """The most bytes that a model may take of a device with `total`. Never more than `coefficient` of it, nor than
    `working` leaves; `own` is the model's own hint in bytes, which counts before `budgets`, and 0 is without limit."""
    most = [int(total * coefficient)]
    asked = own if own is not None else amount(f"budgets of {model_id}", _entry(budgets, model_id), total)
    if asked:
        most.append(asked)
    left = _entry(working, model_id)
    if left:
        most.append(max(total - amount(f"workingVRAM of {model_id}", left, total), 1))
    return max(min(most), 1)


def _entry(amounts: Any, model_id: str) -> Any:
    if isinstance(amounts, Mapping):
        return amounts.get(model_id, amounts.get("*", 0)) or 0
    return amounts or 0
