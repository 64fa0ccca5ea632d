"""Calibrations in which nothing ran, or nothing to its end: their peak would promise nearly the whole device to residents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamic_models import DEVICE, TOKENS, plain, resident, same, untouched
from torch import Tensor, nn

from weightstream import dynamic_offload as ddo


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def enable(model: nn.Module, **arguments: Any) -> ddo.DynamicOffloadApplyResult:
    options = {"execution_device": DEVICE, "environ": {}, "route": "dynamic_offload", "small_tensor_threshold_bytes": 0}
    return ddo.enable_offload(model, profile_name="w", build_profile=True, **{**options, **arguments})


def nothing(model: nn.Module) -> None:
    """Forgets to run it."""


def failing(model: nn.Module) -> None:
    """Runs it, but on what it cannot take, and swallows that."""
    try:
        resident(model, torch.zeros(1))
    except RuntimeError:
        return


def another(model: nn.Module) -> None:
    """Runs a model that is not the one."""
    resident(plain(1), TOKENS)


ALL_KEPT = {"small_tensor_threshold_bytes": 1 << 40}
"""Every leaf stays on the device: there is no unit whose turns could be counted."""


@pytest.mark.parametrize("work", [nothing, failing, another])
@pytest.mark.parametrize("arguments", [{}, ALL_KEPT])
def test_what_did_not_run_is_not_measured(
    work: Callable[[nn.Module], None], arguments: dict[str, Any], folder: Path
) -> None:
    model = plain()
    result = enable(model, **arguments)
    with pytest.warns(RuntimeWarning, match="nothing of this Plain ran to its end") as caught:
        with result.profile_run() as report:
            work(model)
    assert caught[0].filename == __file__, "the warning points at the region"
    assert (
        report["status"] == "unmeasured" and "recommendation" not in report and "'w' is as it was" in report["reason"]
    )
    assert not list(folder.glob("*.json"))
    # The region may be run again, and is measured then.
    with result.profile_run() as report:
        resident(model, TOKENS)
    assert report["status"] == "saved" and len(list(folder.glob("*.json"))) == 1
    ddo.remove_dynamic_offload(model)
    assert untouched(model)


def test_an_earlier_recommendation_stays(folder: Path) -> None:
    model = plain()
    with enable(model).profile_run():
        resident(model, TOKENS)
    (path,) = folder.glob("*.json")
    before = path.read_bytes()
    result = enable(model)
    with pytest.warns(RuntimeWarning, match="nothing"), result.profile_run():
        pass
    assert path.read_bytes() == before
    ddo.remove_dynamic_offload(model)


class Coder(nn.Module):
    """A model that is run by a method of its own and never by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def decode(self, latents: Tensor) -> Tensor:
        return self.inner(latents)


@pytest.mark.parametrize("arguments", [{}, ALL_KEPT])
def test_methods_besides_forward_count(arguments: dict[str, Any]) -> None:
    model = Coder().eval().requires_grad_(False)
    result = enable(model, **arguments)
    with result.profile_run() as report, torch.inference_mode():
        model.decode(torch.zeros(1, 64))
    assert report["status"] == "saved"
    assert not any(part._forward_hooks for part in model.modules()), "what watched is gone"
    ddo.remove_dynamic_offload(model)


def test_a_step_that_fails_beside_one_that_does_not_is_measured() -> None:
    model = plain()
    result = enable(model)
    with result.profile_run() as report:
        failing(model)
        assert same(model, resident(plain(), TOKENS))
    assert report["status"] == "saved"
    ddo.remove_dynamic_offload(model)
