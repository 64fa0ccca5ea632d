"""Names of weights: filters, rules that rename them, prefixes that a file has and a model has not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Optional, TypeVar, Union

from torch import Tensor

from ..errors import WeightsError
from .nearest import nearest

__all__ = ["Seen", "filtered", "guessed_prefix", "preprocess", "renamed", "without_prefix"]

Value = TypeVar("Value")
Rules = Union[Callable[..., Any], Mapping[str, Optional[str]], None]


def filtered(
    sd: Mapping[str, Value], filters: Union[str, Iterable[str], None], keep_prefixes: bool
) -> dict[str, Value]:
    """The entries whose names begin with one of `filters`, without it unless `keep_prefixes`."""
    if filters is None:
        return dict(sd)
    prefixes = [filters] if isinstance(filters, str) else list(filters)
    kept: dict[str, Value] = {}
    for name, value in sd.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            _put(kept, name if keep_prefixes else name[len(prefix) :].removeprefix("."), value, name)
    return kept


def renamed(sd: Mapping[str, Value], rules: Mapping[str, Optional[str]]) -> dict[str, Value]:
    """Applies rules of prefixes, which end at dots: "old": "new" replaces, "old": "" strips, "old": None drops.

    The longest fitting rule counts. "" as the old prefix puts the new one before all names that no other rule fits.
    """
    for old, new in rules.items():
        if not isinstance(old, str) or not (new is None or isinstance(new, str)):
            raise WeightsError(
                f"a rule that renames {old!r} to {new!r}: both must be texts, or the new one None to drop"
            )
    ordered = sorted(((old.rstrip("."), new) for old, new in rules.items()), key=lambda rule: -len(rule[0]))
    result: dict[str, Value] = {}
    for name, value in sd.items():
        target: Optional[str] = name
        for old, new in ordered:
            if old == "" or name == old or name.startswith(old + "."):
                rest = name[len(old) :].removeprefix(".")
                parts = [part for part in ((new or "").rstrip("."), rest) if part]
                target = None if new is None else ".".join(parts)
                break
        if target is not None:
            _put(result, target, value, name)
    return result


def preprocess(
    rules: Rules,
    sd: dict[str, Any],
    quantization_map: Optional[dict[str, Any]],
    tied_map: Optional[dict[str, Any]],
    argument: str = "preprocess_sd",
) -> tuple[dict[str, Any], Optional[dict[str, Any]], Optional[dict[str, Any]]]:
    """Applies a caller's rules, or a function of the weights, of them and the quantization map, or of all three.

    The function returns as many of them as it takes, or the weights alone. `argument` is the name of what the caller gave.
    """
    if rules is None:
        return sd, quantization_map, tied_map
    if isinstance(rules, Mapping):
        maps = renamed(quantization_map, rules) if quantization_map else quantization_map
        return renamed(sd, rules), maps, _renamed_ties(tied_map, rules)
    if not callable(rules):
        raise WeightsError(
            f"{argument} is a {type(rules).__name__}: give a function, or rules for names as a dictionary"
        )
    given: list[Any] = [sd, quantization_map, tied_map]
    result = rules(*given[: _arity(rules)])
    parts = list(result) if isinstance(result, tuple) else [result]
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Mapping):
        raise WeightsError(
            f"{argument} returned a {type(result).__name__}: return the weights, or a tuple of the weights, the "
            f"quantization map and the map of tied weights"
        )
    for name, value in parts[0].items():
        if not isinstance(value, Tensor):
            raise WeightsError(f"{argument} returned a {type(value).__name__} for {name}, where a tensor is due")
    sd, quantization_map, tied_map = (*parts, *given[len(parts) :])
    return dict(sd), quantization_map, tied_map


def _renamed_ties(
    tied: Optional[dict[str, list[str]]], rules: Mapping[str, Optional[str]]
) -> Optional[dict[str, list[str]]]:
    if not tied:
        return tied
    result = {}
    for kept, aliases in tied.items():
        names = [list(renamed({name: None}, rules)) for name in (kept, *aliases)]
        if names[0]:
            result[names[0][0]] = [name for found in names[1:] for name in found]
    return result


def _arity(function: Callable[..., Any]) -> int:
    """How many of three positional arguments a function takes; those with defaults are its own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return min(max(len(needed), 1), 3)


def without_prefix(sd: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The entries below a module, by their names in it."""
    start = prefix.rstrip(".") + "."
    return {name[len(start) :]: value for name, value in sd.items() if name.startswith(start)}


def guessed_prefix(names: Collection[str], expected: Collection[str]) -> Optional[str]:
    """A prefix without which the names are those expected, if they have one and none of them fits as it is."""
    wanted = set(expected)
    if any(name in wanted for name in names):
        return None
    fits: dict[str, int] = {}
    for name in names:
        for dot in (place for place, letter in enumerate(name) if letter == "."):
            if name[dot + 1 :] in wanted:
                fits[name[:dot]] = fits.get(name[:dot], 0) + 1
    return max(fits, key=fits.__getitem__) if fits else None


class Seen:
    """The names that files have, while those that begin with one of `filters` are chosen."""

    def __init__(self, filters: Union[str, Iterable[str], None]) -> None:
        self._prefixes = None if filters is None else (filters,) if isinstance(filters, str) else tuple(filters)
        self._names: set[str] = set()

    def wanted(self, name: str) -> bool:
        """Whether a weight of this name is chosen."""
        if self._prefixes is None:
            return True
        self._names.add(name)
        return name.startswith(self._prefixes)

    def unmet(self, source: str, names: Iterable[str]) -> list[str]:
        """A sentence for each of `filters` that no name begins with, neither one of these nor one that was asked about."""
        known = self._names.union(names) if self._prefixes else set()
        unmet = [prefix for prefix in self._prefixes or () if not any(name.startswith(prefix) for name in known)]
        if unmet:
            known |= {name[:at] for name in known for at, letter in enumerate(name) if letter == "."}
        return [
            f"{source} has no weight whose name begins with {prefix!r}{nearest(prefix.rstrip('.'), known)}"
            for prefix in unmet
        ]


def _put(into: dict[str, Value], name: str, value: Value, was: str) -> None:
    if name in into:
        raise WeightsError(f"{was} would be named {name}, and so is another weight; keep more of their names apart")
    into[name] = value
