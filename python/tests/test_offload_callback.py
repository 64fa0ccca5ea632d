"""Who watches a load hears of every phase in order, and stops it at any point with nothing changed and nothing kept."""

from __future__ import annotations

import gc
import io
import sys
import threading
from pathlib import Path

import pytest
import torch
from offload_files import empty, small
from torch import nn

from weightstream import LoadingCancelled, offload
from weightstream.offload import progress

PHASES = [
    ("Preparing Models", 0, 1, ""),
    ("Reading Weights", 0, 3, "transformer"),
    ("Preparing Weights", 1, 3, "transformer"),
    ("Applying Weights", 2, 3, "transformer"),
    ("Weights Loaded", 3, 3, "transformer"),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    offload.save_model(small(), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_phases_come_in_order_with_the_models_id(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    for path, key in ((saved, str(saved)), ("x.safetensors", saved), (str(saved), "./x.safetensors")):
        heard: list[tuple] = []
        callback = offload.LoadingCallback(progress=lambda *phase: heard.append(phase))
        with offload.loading_context(callback, model_ids={key: "transformer"}) as given:
            assert given is callback
            offload.load_model_data(empty(), path)
        assert heard == PHASES
    heard.clear()
    offload.load_model_data(empty(), saved)
    with offload.loading_context(callback):
        offload.load_sd(saved)
    assert heard == [PHASES[0], ("Reading Weights", 0, 3, ""), ("Weights Loaded", 3, 3, "")]


def test_an_abort_at_any_phase_changes_nothing(saved: Path) -> None:
    for stop in range(1, len(PHASES)):
        heard: list[str] = []
        callback = offload.LoadingCallback(lambda: len(heard) > stop, lambda phase, *_: heard.append(phase))
        model = empty()
        with pytest.raises(LoadingCancelled, match="cancelled"), offload.loading_context(callback):
            offload.load_model_data(model, saved)
        assert heard == [phase for phase, *_ in PHASES[: stop + 1]]
        assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(LoadingCancelled), offload.loading_context(offload.LoadingCallback(lambda: True)):
        raise AssertionError("the context does not begin")


def anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_an_abort_in_the_middle_of_a_conversion_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_POLL_SECONDS", 0.0)
    big = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    offload.save_model(big, tmp_path / "x.safetensors")
    del big
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
    asked: list[str] = []
    phases: list[str] = []

    def abort() -> bool:
        asked.extend(phases[-1:])
        return asked.count("Applying Weights") > 6

    callback = offload.LoadingCallback(abort, lambda phase, *_: phases.append(phase))
    before = anonymous_kib()
    with pytest.raises(LoadingCancelled) as caught, offload.loading_context(callback):
        offload.load_model_data(model, tmp_path / "x.safetensors")
    assert phases[-1] == "Applying Weights" and all(parameter.is_meta for parameter in model.parameters())
    assert caught.value is not None
    gc.collect()
    # 64 MiB would be there if what was converted were kept, by the exception for one.
    assert anonymous_kib() - before < 40 << 10
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_a_callback_raises_is_what_the_caller_sees(saved: Path) -> None:
    class Mine(Exception):
        pass

    def raises(phase: str, *_: object) -> None:
        if phase == "Applying Weights":
            raise Mine

    model = empty()
    with pytest.raises(Mine), offload.loading_context(offload.LoadingCallback(progress=raises)):
        offload.load_model_data(model, saved)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_context_is_its_threads_alone(saved: Path) -> None:
    heard: list[str] = []
    callback = offload.LoadingCallback(progress=lambda phase, *_: heard.append(phase))
    with offload.loading_context(callback):
        other = threading.Thread(target=lambda: offload.load_sd(saved))
        other.start()
        other.join()
    assert heard == ["Preparing Models"]


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_nothing_else_does(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    offload.load_model_data(empty(), saved)
    shown = terminal.getvalue()
    assert "x.safetensors" in shown and "100%" in shown and "Weights Loaded" in shown and shown.endswith("\n")
    monkeypatch.setattr(sys, "stderr", pipe)
    offload.load_model_data(empty(), saved)
    monkeypatch.setattr(sys, "stderr", None)
    offload.load_model_data(empty(), saved)
    assert pipe.getvalue() == ""
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    with offload.loading_context(offload.LoadingCallback()):
        offload.load_model_data(empty(), saved)
    assert quiet.getvalue() == "", "who has a callback draws for himself"
    monkeypatch.undo()


def test_a_terminal_that_cannot_show_the_bar_is_no_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(Terminal):
        def write(self, text: str) -> int:
            raise UnicodeEncodeError("ascii", text, 0, 1, "no")

    monkeypatch.setattr(sys, "stderr", Narrow())
    offload.load_sd(saved)


def test_polls_are_rare_and_an_abort_is_seen_soon() -> None:
    asked: list[float] = []
    watched = progress.Progress(offload.LoadingCallback(lambda: asked.append(0) or False), "")
    for _ in range(100_000):
        watched.poll()
    assert 0 < len(asked) < 1000
