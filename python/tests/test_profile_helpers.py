"""Profiles by a context: DDO's older functions, over files that survive damage."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from weightstream import ProfileError
from weightstream import dynamic_offload as ddo

CONTEXT = {"model": "Wan", "dtype": torch.bfloat16, "size": [832, 480]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_the_folder_is_the_variables_at_each_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ddo.get_dynamic_offload_profile_dir() == folder
    monkeypatch.setenv("DDO_PROFILE_DIR", str(tmp_path / "other"))
    assert ddo.get_dynamic_offload_profile_dir() == tmp_path / "other"
    assert ddo.get_dynamic_offload_profile_dir(tmp_path) == tmp_path
    monkeypatch.delenv("DDO_PROFILE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ddo.get_dynamic_offload_profile_dir() == tmp_path / ".ddo" / "profiles"
    assert ddo.dynamic_offload_profile_path(CONTEXT).parent == tmp_path / ".ddo" / "profiles"


def test_a_key_is_the_hash_of_the_normalized_context() -> None:
    key = ddo.dynamic_offload_profile_key(CONTEXT)
    assert len(key) == 64 and ddo.dynamic_offload_profile_path(CONTEXT).name == f"{key}.json"
    assert key == ddo.dynamic_offload_profile_key({"size": (832, 480), "model": "Wan", "dtype": "torch.bfloat16"})
    assert key != ddo.dynamic_offload_profile_key({**CONTEXT, "size": [832, 481]})
    for wrong in ({}, {"model": object()}, None):
        with pytest.raises(ProfileError):
            ddo.dynamic_offload_profile_key(wrong)  # type: ignore[arg-type]


def test_what_is_recorded_is_loaded() -> None:
    assert ddo.load_dynamic_offload_profile(CONTEXT) is None
    path = ddo.record_dynamic_offload_profile(
        CONTEXT,
        {"status": "success", "peak_vram_gb": 3.5, "capacity": {"frames": 81}},
        None,
        {"resident_module_budget_gb": 2},
    )
    ddo.record_dynamic_offload_profile(CONTEXT, {"status": "success", "capacity": {"frames": 41}})
    ddo.record_dynamic_offload_profile(CONTEXT, {"status": "failed", "capacity": {"frames": 161}})
    profile = ddo.load_dynamic_offload_profile(CONTEXT)
    assert profile is not None and path.is_file()
    assert profile["context"]["dtype"] == "torch.bfloat16" and profile["schema_version"] == 1
    assert [seen["status"] for seen in profile["observations"]] == ["success", "success", "failed"]
    assert ddo.get_dynamic_offload_profile_recommendation(profile)["resident_module_budget_gb"] == 2
    assert ddo.get_dynamic_offload_profile_capacity(profile, "frames") == {"max_success": 81, "min_failure": 161}
    assert ddo.get_dynamic_offload_profile_capacity(profile, "tokens") is None


def test_the_last_twenty_observations_stay() -> None:
    for number in range(25):
        ddo.record_dynamic_offload_profile(CONTEXT, {"number": number})
    profile = ddo.load_dynamic_offload_profile(CONTEXT)
    assert [seen["number"] for seen in profile["observations"]] == list(range(5, 25))


def test_writers_in_threads_lose_nothing() -> None:
    def write(number: int) -> None:
        ddo.record_dynamic_offload_profile(CONTEXT, {"capacity": {f"metric{number}": number}})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profile = ddo.load_dynamic_offload_profile(CONTEXT)
    assert len(profile["capacity_limits"]) == 12 and len(profile["observations"]) == 12


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{", b"{}", b"\0" * 100])
def test_a_file_that_is_none_reads_as_missing_with_a_reason(content: bytes, folder: Path) -> None:
    ddo.record_dynamic_offload_profile(CONTEXT, {"status": "success"})
    ddo.dynamic_offload_profile_path(CONTEXT).write_bytes(content)
    with pytest.warns(RuntimeWarning, match="set aside"):
        assert ddo.load_dynamic_offload_profile(CONTEXT) is None
    assert [path.read_bytes() for path in folder.glob("*.bad")] == [content]
    ddo.record_dynamic_offload_profile(CONTEXT, {"status": "success"})
    assert ddo.load_dynamic_offload_profile(CONTEXT) is not None


def test_what_no_profile_can_hold_is_refused_and_changes_nothing() -> None:
    path = ddo.record_dynamic_offload_profile(CONTEXT, {"status": "success"})
    before = path.read_bytes()
    for observation, advice in [
        ({"peak_vram_gb": "3"}, None),
        ({"peak_vram_gb": float("nan")}, None),
        ({"capacity": {"frames": "81"}}, None),
        ({}, {"resident_module_budget_gb": -1}),
    ]:
        with pytest.raises(ProfileError):
            ddo.record_dynamic_offload_profile(CONTEXT, observation, None, advice)
    assert path.read_bytes() == before


def test_a_file_is_json_that_names_its_workload() -> None:
    path = ddo.record_dynamic_offload_profile({"name": "größe", "model_class": "M"}, {"status": "success"})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["identity"] == {"name": "größe", "model_class": "M"} and content["key"] == path.stem


def test_a_session_keeps_both_profiles() -> None:
    session = ddo.DynamicOffloadProfileSession({"run": 1}, {"machine": 1})
    assert session.execution_profile is None and session.capacity_profile is None
    advice = {"resident_module_budget_gb": session.recommend_resident_budget(24, 10, 1)}
    session.record_success({"peak_vram_gb": 10}, advice)
    assert session.execution_profile and session.capacity_profile and not session.capacity_profile["recommendation"]
    settings = ddo.load_dynamic_offload_settings_from_env(environ={})
    assert session.apply_settings(settings).config.resident_module_budget_gb == 13
    assert session.apply_settings(settings, allow_recommendation=False) is settings
    own = ddo.load_dynamic_offload_settings_from_env(environ={"DDO_RESIDENT_MODULE_BUDGET_GB": "2"})
    assert session.apply_settings(own) is own
    capped = ddo.load_dynamic_offload_settings_from_env(environ={"DDO_MAX_RESIDENT_MODULE_BUDGET_GB": "4"})
    assert session.apply_settings(capped).config.resident_module_budget_gb == 4
    assert session.recommend_resident_budget(8, 10, 1) == 0
    with pytest.raises(ValueError):
        session.recommend_resident_budget(24, float("nan"), 1)
