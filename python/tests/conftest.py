"""One thread for every test: results are then the same on every machine, and two torch processes do not fight. Cuts
everywhere, and no skips for missing packages where none may be missing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def required(modname: str, *_: Any, **__: Any) -> Any:
    """Imports a module; a failure is the test's."""
    return importlib.import_module(modname)


if os.environ.get("WEIGHTSTREAM_REQUIRE_PACKAGES") == "1":
    # Every package is pinned and installed: one that cannot be imported must not turn whole suites into skips.
    pytest.importorskip = required


@pytest.fixture(autouse=True)
def cuts_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts blocks wherever they can be: for models as small as these it never pays, and nothing would be cut."""
    try:
        from weightstream.steps import ModelSteps
    except ImportError:  # the pure tests run without the native module
        return
    monkeypatch.setattr(ModelSteps, "everywhere", True)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """PyTorch's compiler knows nothing when the test begins, and nothing of it afterwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cuts_where_it_pays(cuts_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the choice to the planner, as it is for users."""
    from weightstream.steps import ModelSteps

    monkeypatch.setattr(ModelSteps, "everywhere", False)
