"""A model that was loaded here streams from its file: without a copy, with every change made to it since, or not at all."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path

import pytest
import torch
from attach_models import Towered, host, inputs, run, same_bits
from torch import nn

import weightstream
from weightstream import BudgetError, CheckpointError, LoadingCancelled, offload


def made(seed: int = 0) -> Towered:
    """Blocks of 2 MiB, large enough for pages of their own."""
    torch.manual_seed(seed)
    return Towered([nn.Linear(724, 724, bias=False) for _ in range(6)], 724)


@pytest.fixture
def loaded(tmp_path: Path) -> Towered:
    """Such a model, its weights the pages of a file."""
    offload.save_model(made(), tmp_path / "x.safetensors")
    model = made(seed=1)
    offload.load_model_data(model, tmp_path / "x.safetensors", default_dtype=None)
    model.requires_grad_(False)
    return model


def attach(model: nn.Module, **settings: object) -> weightstream.Attachment:
    return weightstream.attach(model, device=host(granularity=1 << 16), budget="8MiB", **settings)


def test_it_streams_from_its_file_with_the_same_bits(loaded: Towered, tmp_path: Path) -> None:
    expected = run(made().requires_grad_(False), inputs())
    pointers = [block.weight.data_ptr() for block in loaded.blocks]
    with attach(loaded) as attachment:
        report = attachment.report()
        assert {f"blocks.{number}.weight" for number in range(6)} <= set(report["in_files"]) | copied(report)
        assert report["survivors"] == []
        os.unlink(tmp_path / "x.safetensors")
        for _ in range(3):
            assert same_bits(run(loaded, inputs()), expected)
    assert same_bits(run(loaded, inputs()), expected)
    if report["in_files"]:
        assert [block.weight.data_ptr() for block in loaded.blocks] == pointers


def copied(report: dict) -> set[str]:
    """All weights, where the driver at hand may not lock files and they went into the slab."""
    return set() if report["in_files"] else {f"blocks.{number}.weight" for number in range(6)}


def test_what_was_changed_since_loading_reaches_the_device(loaded: Towered) -> None:
    reference = made().requires_grad_(False)
    for model in (loaded, reference):
        model.blocks[2].weight.numpy()[5, 7] = 0.5
        model.blocks[4].weight.mul_(2)
    expected = run(reference, inputs())
    with attach(loaded) as attachment:
        assert not {"blocks.2.weight", "blocks.4.weight"} & set(attachment.report()["in_files"])
        for _ in range(3):
            assert same_bits(run(loaded, inputs()), expected)
        assert torch.equal(attachment.model.state_dict()["blocks.2.weight"], reference.blocks[2].weight)
    assert same_bits(run(loaded, inputs()), expected)


@pytest.mark.parametrize("source", ["file", "memory"])
@pytest.mark.parametrize("pinned", [False, "3MiB", "1GiB"])
def test_what_may_not_be_locked_is_staged_with_the_same_bits(loaded: Towered, source: str, pinned: object) -> None:
    expected = run(made().requires_grad_(False), inputs())
    model = loaded if source == "file" else made().requires_grad_(False)
    with attach(model, pinned_memory=pinned) as attachment:
        memory = attachment.report()["host"]
        limit = {False: 0, "3MiB": 3 << 20, "1GiB": 1 << 30}[pinned]
        assert memory["registered_bytes"] <= limit
        assert (memory["file_bytes"] + memory["pageable_bytes"] > 0) == (pinned != "1GiB")
        if not pinned:
            assert memory["registered_bytes"] == 0 and bool(memory["file_bytes"]) == (source == "file")
        for _ in range(3):
            assert same_bits(run(model, inputs()), expected)
        state = attachment.model.state_dict()
        assert torch.equal(state["blocks.3.weight"], made().blocks[3].weight)
    assert same_bits(run(model, inputs()), expected)


def test_a_file_cut_while_it_streams_is_an_error_and_not_the_end(loaded: Towered, tmp_path: Path) -> None:
    expected = run(made().requires_grad_(False), inputs())
    path = tmp_path / "x.safetensors"
    content, times = path.read_bytes(), path.stat()
    attachment = attach(loaded, pinned_memory=False)
    assert same_bits(run(loaded, inputs()), expected)
    os.truncate(path, 8192)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        run(loaded, inputs())
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert same_bits(run(loaded, inputs()), expected), "the next step is right once the file is"
    attachment.detach()


@pytest.mark.parametrize("pinned", ["x", -1, None, 1.5])
def test_limits_that_cannot_be_read(loaded: Towered, pinned: object) -> None:
    with pytest.raises(BudgetError, match="pinned_memory is"):
        attach(loaded, pinned_memory=pinned)


def test_a_file_that_was_changed_is_refused(loaded: Towered, tmp_path: Path) -> None:
    kept = {name: id(parameter) for name, parameter in loaded.named_parameters()}
    path = tmp_path / "x.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*changed"):
        attach(loaded)
    assert {name: id(parameter) for name, parameter in loaded.named_parameters()} == kept


def test_attaching_reports_pinning_and_can_be_cancelled(loaded: Towered, tmp_path: Path) -> None:
    expected = run(made().requires_grad_(False), inputs())
    heard: list[tuple] = []
    ids = {tmp_path / "x.safetensors": "transformer"}
    with offload.loading_context(offload.LoadingCallback(progress=lambda *phase: heard.append(phase)), model_ids=ids):
        attach(loaded).detach()
    assert heard == [
        ("Preparing Models", 0, 1, ""),
        ("Pinning", 0, 1, "transformer"),
        ("Pinning", 1, 1, "transformer"),
    ]
    for stop in (2, 3):
        heard.clear()
        callback = offload.LoadingCallback(lambda: len(heard) >= stop, lambda *phase: heard.append(phase))
        with pytest.raises(LoadingCancelled), offload.loading_context(callback, model_ids=ids):
            attach(loaded)
        assert same_bits(run(loaded, inputs()), expected), "a plain model as before"
    with attach(loaded):
        assert same_bits(run(loaded, inputs()), expected)


def test_twenty_cycles_return_everything(tmp_path: Path) -> None:
    offload.save_model(made(), tmp_path / "x.safetensors")

    def cycle() -> None:
        model = made(seed=1)
        offload.load_model_data(model, tmp_path / "x.safetensors", default_dtype=None)
        with attach(model.requires_grad_(False)):
            run(model, inputs())

    def state() -> tuple[int, int, int]:
        gc.collect()  # a model that was wrapped is part of a cycle
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    cycle()
    before = state()
    assert before[2] == 0, "nothing keeps the file mapped"
    for _ in range(20):
        cycle()
    # What earlier tests left may go meanwhile.
    assert all(now <= was for now, was in zip(state(), before))


def overwritten(path: Path) -> None:
    """Writes zeros over a part of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(1 << 16)
        file.write(bytes(1 << 20))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_file_changed_in_place_is_an_error_also_outside_steps(loaded: Towered, tmp_path: Path, pinned: bool) -> None:
    expected = run(made().requires_grad_(False), inputs())
    with torch.inference_mode(), attach(loaded, pinned_memory=pinned) as attachment:
        for _ in range(2):
            assert same_bits(run(loaded, inputs()), expected)
        assert attachment.report()["in_files"]
        overwritten(tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="x.safetensors"):
            for block in loaded.blocks:
                block(torch.randn(1, 724))
        with pytest.raises(CheckpointError, match="x.safetensors"), attachment.resident(loaded.blocks[0]):
            pass
        with pytest.raises(CheckpointError, match="x.safetensors"):
            run(loaded, inputs())


@pytest.mark.parametrize("pinned", [True, False])
def test_a_touched_file_is_refused_with_the_way_out_which_works(loaded: Towered, tmp_path: Path, pinned: bool) -> None:
    expected = run(made().requires_grad_(False), inputs())
    path = tmp_path / "x.safetensors"
    with torch.inference_mode(), attach(loaded, pinned_memory=pinned) as attachment:
        assert same_bits(run(loaded, inputs()), expected)
        assert attachment.report()["in_files"]
        os.utime(path)
        with pytest.raises(
            CheckpointError, match=r"x\.safetensors .*written to or touched.*load the model again"
        ) as refused:
            run(loaded, inputs())
        time = str(refused.value).rpartition("touch -d ")[2]
        subprocess.run(["touch", "-d", time.strip(), str(path)], check=True)
        for _ in range(2):
            assert same_bits(run(loaded, inputs()), expected)


def test_a_file_changed_in_a_step_is_an_error_of_that_step(loaded: Towered, tmp_path: Path) -> None:
    with torch.inference_mode(), attach(loaded) as attachment:
        for _ in range(2):
            run(loaded, inputs())
        assert attachment.report()["in_files"]
        hook = loaded.blocks[2].register_forward_pre_hook(lambda *_: overwritten(tmp_path / "x.safetensors"))
        with pytest.raises(CheckpointError, match="x.safetensors"):
            run(loaded, inputs())
        hook.remove()


def test_host_bytes_of_a_cut_file_are_an_error_and_no_dead_process(loaded: Towered, tmp_path: Path) -> None:
    with torch.inference_mode(), attach(loaded) as attachment:
        run(loaded, inputs())
        names = [name for name in attachment.report()["in_files"] if name.startswith("blocks.5")]
        assert names
        os.truncate(tmp_path / "x.safetensors", 1 << 16)
        weight = loaded.blocks[5].weight
        for read in (weight.cpu, weight.sum, weight.__repr__, lambda: weight.__deepcopy__({})):
            with pytest.raises(CheckpointError, match="x.safetensors"):
                read()
        with pytest.raises(CheckpointError, match="x.safetensors"):
            offload.save_model(loaded, tmp_path / "copy.safetensors")
        assert not (tmp_path / "copy.safetensors").exists()
