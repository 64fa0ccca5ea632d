"""Models of one pipeline that share weights: the same bits, one copy on the device and in RAM, and the tie stays."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_models import Model, device, set_up
from shared_models import (
    CASES,
    WIDTH,
    Models,
    blocks_of_both,
    check,
    encoder_of_two,
    fail_somewhere,
    held,
    layers_in_blocks,
    made,
    model_in_another,
    models_in_blocks,
    parameter,
    peak,
    some_blocks,
)
from torch import Tensor, nn

from weightstream import StateError, offload, runtime, steps


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("build", CASES)
def test_the_bits_are_the_resident_ones_whoever_runs(build: Any, order: str) -> None:
    models, references, x = made(build)
    names = list(models)
    with set_up(models, budgets=0.15, coTenantsMap={}, device=device(order=order)) as managed:
        for turns in (names, names[::-1], [names[0]] * 3 + [names[-1]] * 3, names):
            check(models, references, x, *turns)
        assert len(managed.shared) + sum(one.part is not None for one in managed.models.values()) >= 1
        draw = random.Random(1)
        for _ in range(12):
            check(models, references, x, draw.choice(names))
            if draw.random() < 0.3:
                managed.unload_all(draw.sample(names, 1))
        managed.unload_all()
        assert held(managed) == 0
        check(models, references, x)
    check(models, references, x)


@pytest.mark.parametrize("build", CASES)
def test_the_tie_stays_and_the_bytes_are_there_once(build: Any) -> None:
    models, _, x = made(build)
    places = {name: tensors(model) for name, model in models.items()}
    before = {name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()}
    unique = sum(2 * n for n in distinct(models).values())
    with set_up(models, budgets=0, pinnedMemory=True) as managed:
        for name, model in models.items():
            assert {path: id(tensor) for path, tensor in tensors(model).items()} == {
                path: id(tensor) for path, tensor in places[name].items()
            }, "the same objects"
            for key, value in model.state_dict().items():
                assert torch.equal(value.float(), before[name][key].bfloat16().float()), key
                assert not isinstance(value, nn.Parameter)
        addresses = {parameter.data_ptr() for model in models.values() for parameter in model.parameters()}
        host = [report["host"] for report in managed.report().values()]
        locked = sum(one["registered_bytes"] + one["pageable_bytes"] for one in host)
        assert unique <= locked < unique + (len(host) + 8) * 4096 * 4
        # 0 is without limit: everything is resident, once.
        with torch.no_grad():
            for model in models.values():
                model(x)
        assert len(addresses) == len({p.data_ptr() for model in models.values() for p in model.parameters()})
    assert ties(models) == {frozenset(group) for group in ties_of(places)}
    assert all(type(parameter) is nn.Parameter for model in models.values() for parameter in model.parameters())


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def distinct(models: Models) -> dict[int, int]:
    """Elements by the start of each storage that weights lie in."""
    found: dict[int, int] = {}
    for model in models.values():
        for weight in model.parameters():
            start = weight.untyped_storage().data_ptr()
            found[start] = max(found.get(start, 0), weight.numel())
    return found


def ties(models: Models) -> set[frozenset[str]]:
    return {frozenset(group) for group in ties_of({name: tensors(model) for name, model in models.items()})}


def ties_of(everything: dict[str, dict[str, Tensor]]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, found in everything.items():
        for path, tensor in found.items():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(f"{name}.{path}")
    return [group for group in groups.values() if len(group) > 1]


def test_an_encoder_of_two_models_streams_within_their_budgets() -> None:
    models, references, x = made(encoder_of_two)
    with set_up(models, budgets=0.2, coTenantsMap={}) as managed:
        for _ in range(3):
            check(models, references, x)
        part = managed.shared["prior+decoder"].attachment
        stats = part.stats()
        assert stats["copies"] > 0, "it streams"
        assert managed.models["prior"].attachment.budget <= 0.2 * 2**20 + 8192
        assert peak(managed) <= 0.2 * 2**20 * 1.02 + 2 * 4096, "one model's budget, since they take turns"
        assert set(managed.report()) == {"prior", "decoder", "prior+decoder"}
        assert set(managed.models) == {"prior", "decoder"}
        encoder, reference = models["prior"].encoder, references["prior"].encoder
        managed.unload_all()
        with torch.no_grad():
            assert torch.equal(encoder(x), reference(x)), "called alone"
            assert torch.equal(encoder.encode(x), reference.encode(x)), "by a method that nobody wraps"
            assert torch.equal(encoder.blocks[2].norm(x), reference.blocks[2].norm(x))
        assert managed.loaded() == []


def test_it_leaves_with_the_last_of_its_models() -> None:
    models, references, x = made(encoder_of_two)
    everything = {**models, "vae": Model(WIDTH, 3).bfloat16()}
    company = {"prior": ["decoder"], "decoder": ["prior"]}
    with set_up(everything, budgets=0.3, coTenantsMap=company) as managed, torch.no_grad():
        check(models, references, x)
        part = managed.shared["prior+decoder"]
        assert part.part.is_here()
        managed.unload_all(["decoder"])
        assert part.part.is_here(), "the other is here"
        check(models, references, x, "decoder")
        everything["vae"](x)
        assert managed.loaded() == ["vae"]
        assert not part.part.is_here()
        assert torch.equal(
            models["prior"].encoder.first.weight.float(), references["prior"].encoder.first.weight.float()
        )
        check(models, references, x)


def test_a_model_inside_another_keeps_its_id_its_budget_and_runs_in_it() -> None:
    models, references, x = made(model_in_another)
    budgets = {"text_encoder": 0.15, "transformer": 0.12}
    models["text_encoder"]._offload_hooks = ["encode"]
    with set_up(models, budgets=budgets, coTenantsMap={}) as managed, torch.no_grad():
        for _ in range(3):
            check(models, references, x)
        assert list(managed.models) == ["transformer", "text_encoder"]
        for name, most in budgets.items():
            attachment = managed.models[name].attachment
            assert attachment.stats()["copies"] > 0
            engine = attachment.report()["engine"]
            assert (engine["own_pages"] + engine["ring_pages"]) * engine["page_bytes"] <= most * 2**20
        managed.unload_all(keep=["transformer"])
        assert managed.loaded() == ["transformer"]
        check(models, references, x, "transformer")
        assert managed.loaded() == ["transformer", "text_encoder"]
        encoder = models["text_encoder"]
        assert runtime.execution_device(encoder) == torch.device("cpu")
        assert torch.equal(encoder.encode(x), references["text_encoder"].encode(x))
        refused: list[str] = []

        def unload(*_: Any) -> None:
            with pytest.raises(StateError, match="running") as caught:
                managed.unload_all(keep=["transformer"])
            refused.append(str(caught.value))

        handle = models["transformer"].body.register_forward_pre_hook(unload)
        check(models, references, x, "transformer")
        handle.remove()
        assert refused
    assert "encode" not in models["text_encoder"].__dict__


@pytest.mark.parametrize("build", [encoder_of_two, model_in_another, blocks_of_both])
def test_an_error_anywhere_leaves_all_of_them_right(build: Any) -> None:
    models, references, x = made(build)
    draw = random.Random(3)
    with set_up(models, budgets=0.2, coTenantsMap={}) as managed:
        check(models, references, x)
        in_use: list[int] = []
        for _ in range(25):
            fail_somewhere(models, references, x, draw)
            check(models, references, x)
            in_use.append(held(managed))
        # A ring that was larger once may stay so.
        assert in_use[5:] == [in_use[5]] * 20, in_use


def test_release_and_cycles_grow_nothing_and_a_running_model_keeps_what_it_shares() -> None:
    place = device()
    for _ in range(4):
        models, references, x = made(encoder_of_two)
        managed = set_up(models, budgets=0.2, device=place, coTenantsMap={})
        check(models, references, x)
        seen: list[int] = []

        def release(*_: Any, managed: Any = managed, seen: list[int] = seen) -> None:
            with pytest.raises(StateError, match="running"):
                managed.release()
            seen.append(1)

        handle = models["prior"].body.register_forward_pre_hook(release)
        check(models, references, x, "prior")
        handle.remove()
        assert seen
        managed.release()
        managed.release()
        assert held(managed) == 0
        check(models, references, x)
        assert not any("_weightstream" in module.__dict__ for model in models.values() for module in model.modules())
        del managed, models, references
        gc.collect()


@pytest.mark.parametrize("build", [layers_in_blocks, models_in_blocks, some_blocks, encoder_of_two, model_in_another])
def test_models_that_share_modules_do_not_make_each_other_start_over(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str] = []

    class Counting(steps._Lending):
        def __init__(self, of: Any) -> None:
            watched.append(type(of._model).__name__)
            super().__init__(of)

    monkeypatch.setattr(steps, "_Lending", Counting)
    models, references, x = made(build)
    with set_up(models, budgets=0.3, coTenantsMap={}) as managed:
        check(models, references, x)
        watched.clear()
        for _ in range(3):
            check(models, references, x)
        assert watched == [], "steps are watched again"
        for part in managed.shared.values():  # other units of what is shared are no news to its models
            part.attachment.set_budget(part.attachment.budget * 2)
        check(models, references, x)
        assert not {"Deep", "Model", "Guided"}.intersection(watched) or build is model_in_another


def test_a_module_that_only_holds_what_another_model_has_brings_its_model() -> None:
    models, references, x = made(parameter)
    for one in (models, references):
        head = nn.Linear(WIDTH, WIDTH, bias=False)
        head.weight = one["transformer"].first.weight
        one["text_encoder"].head = head
    with set_up(models, budgets=0.2, coTenantsMap={}) as managed, torch.no_grad():
        for _ in range(2):
            check(models, references, x, "transformer")
            managed.unload_all()
            assert torch.equal(models["text_encoder"].head(x), references["text_encoder"].head(x))
            assert managed.loaded() == ["text_encoder"]
        check(models, references, x)


@pytest.mark.parametrize(("build", "name", "other"), [
    (encoder_of_two, "prior", "decoder"),
    (model_in_another, "transformer", "text_encoder"),
])  # fmt: skip
def test_loras_of_a_model_reach_what_it_shares(build: Any, name: str, other: str, tmp_path: Path) -> None:
    models, _, x = made(build)
    alone = {name: copy.deepcopy(models[name])}
    shapes = {"body.first": (64, 64), "encoder.first": (64, 64), "encoder.blocks.3.down": (64, 128)}
    lora: dict[str, Tensor] = {}
    for layer, (rows, columns) in shapes.items():
        lora[f"{layer}.lora_A.weight"] = torch.randn(4, columns) * 0.2
        lora[f"{layer}.lora_B.weight"] = torch.randn(rows, 4) * 0.2
    safetensors = pytest.importorskip("safetensors.torch")
    path = str(tmp_path / "lora.safetensors")
    safetensors.save_file({f"diffusion_model.{key}": value for key, value in lora.items()}, path)

    def run(these: Models, which: str) -> Tensor:
        for module in these[which].modules():
            if isinstance(module, Model):
                module.scale.fill_(1)  # which a forward writes
        with torch.no_grad():
            return these[which](x)

    with set_up(alone, loras=name, budgets=0):
        plain = run(alone, name)
        offload.load_loras_into_model(alone[name], [path], [0.7])
        wanted = run(alone, name)
    assert not torch.equal(plain, wanted)
    with set_up(models, loras=name, budgets=0.3, coTenantsMap={}):
        assert torch.equal(run(models, name), plain)
        without = run(models, other)
        offload.load_loras_into_model(models[name], [path], [0.7])
        assert models[name]._loras_errors == []
        for _ in range(3):
            assert torch.equal(run(models, name), wanted)
            run(models, other)
        offload.unload_loras_from_model(models[name])
        assert torch.equal(run(models, name), plain)
        assert torch.equal(run(models, other), without)


@pytest.mark.parametrize("build", [parameter, encoder_of_two, model_in_another])
def test_without_its_offload_object_a_pipeline_goes_on_and_dropped_it_leaves_nothing(build: Any) -> None:
    models, references, x = made(build)
    target = next(iter(set_up(models, budgets=0.2).models.values())).group.target.native
    gc.collect()
    for _ in range(2):
        check(models, references, x)
    for name in list(models):
        del models[name]  # what the others share with it stays
        gc.collect()
        check(models, references, x, *models)
    gc.collect()
    assert target.free_memory() == target.total_memory
