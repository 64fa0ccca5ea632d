"""One thread for every test: results are then the same on every machine, and two torch processes do not fight."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cuts_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts blocks wherever they can be: for models as small as these it never pays, and nothing would be cut."""
    try:
        from weightstream.steps import ModelSteps
    except ImportError:  # the pure tests run without the native module
        return
    monkeypatch.setattr(ModelSteps, "everywhere", True)


@pytest.fixture
def cuts_where_it_pays(cuts_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the choice to the planner, as it is for users."""
    from weightstream.steps import ModelSteps

    monkeypatch.setattr(ModelSteps, "everywhere", False)
