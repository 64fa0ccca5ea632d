"""Adapters of models that stream: counted in the budget, resident while there is room, else block by block with their model."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_models import host, run, same_bits, weight_bytes
from lora_models import Adapter, Model, adapter, assert_close, inputs, merged, model, whole_differences
from pipeline_models import device

import weightstream
from weightstream import BudgetError, StateError, offload
from weightstream.adapters.state import state_of
from weightstream.adapters.streaming import Company

F32 = torch.zeros(0)


def wide(seed: int = 0, rank: int = 64) -> Adapter:
    """An adapter that is larger than what it adapts."""
    generator = torch.Generator().manual_seed(seed)
    tensors, changes = {}, {}
    for number in range(6):
        for name, rows, columns in (("up", 64, 32), ("down", 32, 64)):
            down = torch.randn(rank, columns, generator=generator) * 0.05
            up = torch.randn(rows, rank, generator=generator) * 0.05
            start = f"blocks.{number}.{name}"
            tensors.update({f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up})
            delta = up.double() @ down.double()
            changes[f"{start}.weight"] = lambda weight, multiplier, delta=delta: weight + multiplier * delta
    return Adapter(tensors, changes)


@contextlib.contextmanager
def tight(made: Model, share: float = 0.75, **settings: Any) -> Iterator[weightstream.Attachment]:
    with weightstream.attach(made, device=host(**settings), budget=int(weight_bytes(made) * share)) as attachment:
        yield attachment


def companies(made: Model) -> list[Company]:
    return [company for _, company in state_of(made)._settled._companies]


def copied(made: Model) -> int:
    """Bytes of adapters that were copied so far."""
    (company,) = companies(made)
    return company._own.stats()["copied_bytes"]


@pytest.fixture
def big(tmp_path: Path) -> tuple[str, Adapter]:
    made = wide()
    return made.write(tmp_path / "wide.safetensors"), made


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_what_does_not_fit_streams_with_its_blocks(big: tuple[str, Adapter], order: str) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted, plain = {m: run(merged(made, (given, m)), x) for m in (1.0, 0.5)}, run(made, x)
    with tight(made, order=order) as attachment:
        before = attachment.budget
        offload.load_loras_into_model(made, path)
        (company,) = companies(made)
        total = sum(tensor.nbytes for tensor in given.tensors.values())
        assert company.nbytes < total and attachment.budget == before
        assert attachment._runtime.offloader.budget() <= before - company.nbytes
        for _ in range(4):
            assert_close(run(made, x), wanted[1.0], F32)
        offload.activate_loras(made, [0], [0.5])
        assert companies(made) == [company]
        for _ in range(2):
            assert_close(run(made, x), wanted[0.5], F32)
        offload.unload_loras_from_model(made)
        assert attachment.budget == attachment._runtime.offloader.budget() == before
        for _ in range(2):
            assert same_bits(run(made, x), plain)


def test_a_step_at_zero_copies_nothing(big: tuple[str, Adapter]) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted, plain = run(merged(made, (given, 1.0)), x), run(made, x)
    with tight(made):
        offload.load_loras_into_model(made, path, [[1.0, 0.0]])
        for _ in range(3):
            assert_close(run(made, x), wanted, F32)
        before = copied(made)
        assert before > 0
        offload.set_step_no_for_lora(made, 1)
        for _ in range(3):
            assert same_bits(run(made, x), plain)
        assert copied(made) == before
        offload.set_step_no_for_lora(made, 0)
        assert_close(run(made, x), wanted, F32)
        assert copied(made) > before


def test_blocks_and_layers_called_alone_are_adapted(big: tuple[str, Adapter]) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    reference = merged(made, (given, 1.0))
    h = torch.randn(2, 7, 32)
    with tight(made):
        offload.load_loras_into_model(made, path)
        for _ in range(2):
            for number in (4, 1, 5):
                assert_close(run(made.blocks[number], h), run(reference.blocks[number], h.double()), F32)
                assert_close(run(made.blocks[number].up, h), run(reference.blocks[number].up, h.double()), F32)
            assert_close(run(made, x), run(reference, x), F32)


def test_an_error_in_a_forward_leaves_both_engines_right(
    big: tuple[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted = run(merged(made, (given, 1.0)), x)
    with tight(made):
        offload.load_loras_into_model(made, path)
        for error in (ValueError, KeyboardInterrupt):
            for at in range(1, 8):
                calls = 0

                def gelu(value: torch.Tensor, error: Any = error, at: int = at) -> torch.Tensor:
                    nonlocal calls
                    calls += 1
                    if calls == at:
                        raise error
                    return value * torch.sigmoid(1.702 * value)

                with monkeypatch.context() as patch:
                    patch.setattr(torch.nn.functional, "gelu", gelu)
                    with pytest.raises(error):
                        run(made, x)
                assert_close(run(made, x), wanted, F32)


def test_adapters_change_only_between_forwards(big: tuple[str, Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted = run(merged(made, (given, 1.0)), x)
    with tight(made):
        offload.load_loras_into_model(made, path)
        gelu = torch.nn.functional.gelu

        def meddle(value: torch.Tensor) -> torch.Tensor:
            for call in (
                lambda: offload.load_loras_into_model(made, path, [0.5]),
                lambda: offload.unload_loras_from_model(made),
                lambda: offload.activate_loras(made, []),
            ):
                with pytest.raises(StateError, match="adapters"):
                    call()
            return gelu(value)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "gelu", meddle)
            assert_close(run(made, x), wanted, F32)
        assert_close(run(made, x), wanted, F32)


def test_a_budget_too_small_for_a_ring_is_refused_with_what_is_needed(big: tuple[str, Adapter], tmp_path: Path) -> None:
    made, x, (path, _) = model(blocks=6), inputs(), big
    small = adapter("lora", blocks=range(6))
    other = small.write(tmp_path / "small.safetensors")
    wanted = run(merged(made, (small, 0.5)), x)
    with tight(made, 0.35) as attachment:
        before = attachment.budget
        offload.load_loras_into_model(made, other, [0.5])
        with pytest.raises(BudgetError, match="adapters of Model need .* beside the model"):
            offload.load_loras_into_model(made, [path] * 3)
        for _ in range(2):
            assert_close(run(made, x), wanted, F32)
        offload.unload_loras_from_model(made)
        assert attachment.budget == before


def test_a_budget_that_is_changed_meanwhile_counts_adapters(tmp_path: Path) -> None:
    made, x = model(blocks=6), inputs()
    given = adapter("lora", blocks=range(6))
    wanted = run(merged(made, (given, 1.0)), x)
    with tight(made) as attachment:
        offload.load_loras_into_model(made, given.write(tmp_path / "a.safetensors"))
        own = attachment.budget - attachment._runtime.offloader.budget()
        assert own > 0
        for budget in (int(weight_bytes(made) * 0.6), "400KiB", "0.1%", int(weight_bytes(made) * 0.7)):
            before = attachment.budget
            try:
                attachment.set_budget(budget)
            except BudgetError:
                assert budget == "0.1%" and attachment.budget == before
            else:
                wants = {"400KiB": 400 << 10, "0.1%": int((256 << 20) * 0.001)}.get(budget, budget)
                assert abs(attachment.budget - wants) <= 1
            assert attachment.budget - attachment._runtime.offloader.budget() == own
            for _ in range(2):
                assert_close(run(made, x), wanted, F32)
        with pytest.raises(BudgetError):
            attachment.set_budget(own)
        attachment.set_budget(None)
        offload.unload_loras_from_model(made)
        assert attachment.budget == attachment._runtime.offloader.budget()


def test_adapters_follow_attach_and_detach(big: tuple[str, Adapter], tmp_path: Path) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    norms = whole_differences()
    paths = [path, norms.write(tmp_path / "norms.safetensors")]
    wanted = [run(merged(made, (given, m), (norms, 0.5)), x) for m in (1.0, 0.25)]
    offload.load_loras_into_model(made, paths, [[1.0, 0.25], 0.5])
    offload.set_step_no_for_lora(made, 1)
    assert_close(run(made, x), wanted[1], F32)
    for _ in range(2):
        with tight(made):
            assert len(companies(made)) == 1
            for _ in range(3):
                assert_close(run(made, x), wanted[1], F32)
            offload.set_step_no_for_lora(made, 0)
            assert_close(run(made, x), wanted[0], F32)
            offload.set_step_no_for_lora(made, 1)
        assert companies(made) == []
        assert_close(run(made, x), wanted[1], F32)
    with tight(made):
        assert_close(run(made, x), wanted[1], F32)
        offload.unload_loras_from_model(made)
    assert all("forward" not in module.__dict__ for module in made.modules())
    assert_close(run(made, x), run(merged(made), x), F32)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("most", [-1, 0.01])
def test_streamed_adapters_are_page_locked_as_asked(big: tuple[str, Adapter], pinned: bool, most: float) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted = run(merged(made, (given, 1.0)), x)
    with tight(made):
        offload.load_loras_into_model(made, path, pinnedLora=pinned, maxReservedLoras=most)
        for _ in range(3):
            assert_close(run(made, x), wanted, F32)


def test_models_of_a_pipeline_take_turns_with_their_adapters(tmp_path: Path) -> None:
    first, second, x = model(blocks=6), model(blocks=6, seed=1), inputs()
    one, two = wide(0), wide(1)
    paths = [one.write(tmp_path / "1.safetensors"), two.write(tmp_path / "2.safetensors")]
    wanted = [run(merged(first, (one, 1.0)), x), run(merged(second, (two, 0.5)), x)]
    plain = [run(merged(first), x), run(merged(second), x)]
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None, "verboseLevel": 0}
    budget = weight_bytes(first) * 0.8 / 2**20
    models = {"first": first, "second": second}
    with offload.all(models, loras=["first", "second"], budgets=budget, coTenantsMap={}, **settings) as managed:
        offload.load_loras_into_model(first, paths[0])
        for _ in range(2):
            assert_close(run(first, x), wanted[0], F32)
            assert_close(run(second, x), plain[1], F32)
        offload.load_loras_into_model(second, paths[1], [0.5])
        for _ in range(2):
            for part, made in zip(wanted, (first, second)):
                assert_close(run(made, x), part, F32)
        here = [company._own._runtime.offloader.is_here() for made in (first, second) for company in companies(made)]
        assert here == [False, True]
        managed.unload_all()
        assert not companies(second)[0]._own._runtime.offloader.is_here()
        assert_close(run(first, x), wanted[0], F32)
        offload.unload_loras_from_model(first)
        assert_close(run(first, x), plain[0], F32)
        assert_close(run(second, x), wanted[1], F32)
    assert_close(run(second, x), plain[1], F32)
    assert state_of(first) is None and state_of(second) is None


def test_resident_adapters_leave_the_device_with_their_model(tmp_path: Path) -> None:
    models, x = {"first": model(blocks=6), "second": model(blocks=6, seed=1)}, inputs()
    files = [adapter("lora", blocks=range(6)), adapter("lokr", 1, blocks=range(6))]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    wanted = [run(merged(made, *((one, 1.0) for one in files)), x) for made in models.values()]
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None, "verboseLevel": 0}

    def placed(made: Model) -> bool:
        stacks = [part for layer in state_of(made)._built.computed.values() for part in layer.modules()]
        return all(not part.down.is_meta for part in stacks if hasattr(part, "down"))

    for company, stays in (({}, False), ({"first": ["second"], "second": ["first"]}, True)):
        with offload.all(models, loras=["first", "second"], coTenantsMap=company, budgets=0.4, **settings):
            for made in models.values():
                offload.load_loras_into_model(made, paths)
            for _ in range(2):
                for made, expected in zip(models.values(), wanted):
                    assert_close(run(made, x), expected, F32)
                assert placed(models["second"]) and placed(models["first"]) is stays


def test_late_adapters_work_from_the_next_forward_on(tmp_path: Path) -> None:
    made, x = model(blocks=6), inputs()
    files = [adapter(kind, seed, blocks=range(6)) for seed, kind in enumerate(("lora", "conv", "dora"))]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(files)]
    wanted = [run(merged(made, (one, 0.5)), x) for one in files]
    plain = run(made, x)
    with tight(made):
        for number, path in enumerate(paths):
            assert same_bits(run(made, x), plain)
            assert same_bits(run(made.blocks[0], torch.zeros(1, 3, 32)), run(made.blocks[0], torch.zeros(1, 3, 32)))
            offload.load_loras_into_model(made, path, [0.5])
            assert_close(run(made, x), wanted[number], F32)
            offload.unload_loras_from_model(made)
        offload.load_loras_into_model(made, paths, [0.5] * 3)
        for number in (2, 0, 1):
            offload.activate_loras(made, [number], [0.5])
            assert_close(run(made, x), wanted[number], F32)


def test_another_thread_cannot_change_adapters_meanwhile(
    big: tuple[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x, (path, given) = model(blocks=6), inputs(), big
    wanted = run(merged(made, (given, 1.0)), x)
    with tight(made):
        offload.load_loras_into_model(made, path)
        gelu, errors = torch.nn.functional.gelu, []

        def unload() -> None:
            try:
                offload.unload_loras_from_model(made)
            except StateError as error:
                errors.append(str(error))

        def slow(value: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=unload)
            thread.start()
            thread.join()
            return gelu(value)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "gelu", slow)
            assert_close(run(made, x), wanted, F32)
        assert errors and all("another thread runs the model" in text for text in errors)


def test_a_model_that_is_dropped_takes_its_adapters_along(big: tuple[str, Adapter]) -> None:
    import weakref

    made, (path, _) = model(blocks=6), big
    attachment = weightstream.attach(made, device=host(), budget=int(weight_bytes(made) * 0.75))
    offload.load_loras_into_model(made, path)
    run(made, inputs())
    kept = weakref.ref(made)
    del made, attachment
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("left", [["0"], []], ids=["fewer", "none"])
def test_adapters_that_are_chosen_anew_while_their_model_is_away(left: list[str], tmp_path: Path) -> None:
    made = model()
    x = inputs()
    given = [adapter("lora", 1), adapter("dora", 2)]
    paths = [one.write(tmp_path / f"{number}.safetensors") for number, one in enumerate(given)]
    settings = {"quantizeTransformer": False, "device": device(), "convertWeightsFloatTo": None, "budgets": {"*": 0.3}}
    with offload.all({"transformer": made}, loras="transformer", verboseLevel=0, **settings) as managed:
        before = run(made, x)
        offload.load_loras_into_model(made, paths, [0.5, 1.0])
        run(made, x)
        managed.unload_all()
        offload.activate_loras(made, left, [0.3] * len(left))
        expected = run(merged(made, *[(given[0], 0.3)][: len(left)]), x)
        for _ in range(3):
            assert_close(run(made, x), expected, torch.zeros(0))
        managed.unload_all()
        offload.unload_loras_from_model(made)
        assert same_bits(run(made, x), before)
