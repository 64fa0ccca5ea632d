"""Setting up and releasing whole pipelines, interrupted at any line: nothing is left behind, and what was cut short is completed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from interrupts import interrupted_at
from pipeline_models import device, set_up
from shared_models import check, encoder_of_two, layer, made, model_in_another

FILES = ("pipeline.py", "planning.py", "parts.py", "shared.py", "managed.py", "preloads.py", "pinning.py", "group.py")
PLACES = 12


def attributes(models: Any) -> dict[str, set[str]]:
    return {f"{name}.{path}": set(vars(part)) for name, model in models.items() for path, part in model.named_modules()}


def made_halved(build: Any) -> Any:
    """Models whose weights need no conversion, which stays where it was done."""
    models, references, x = made(build)
    for model in models.values():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.bfloat16()
    return models, references, x


@pytest.mark.parametrize("build", [layer, encoder_of_two, model_in_another])
@pytest.mark.parametrize("release", [False, True])
def test_an_interrupt_at_any_line_leaves_nothing_or_is_made_good(build: Any, release: bool) -> None:
    settings = {"budgets": 0.2, "coTenantsMap": {}, "autoPreload": {}, "pinnedMemory": True}
    models, references, x = made_halved(build)
    managed = None if not release else set_up(models, **settings)
    if release:
        check(models, references, x)
    with interrupted_at(-1, FILES) as seen:
        managed = managed or set_up(models, **settings)
        if release:
            managed.release()
    lines, hits = seen[0], 0
    managed.release()
    assert lines > 50
    places = {*range(1, 8), *range(lines - 12, lines + 1), *(lines * n // PLACES for n in range(1, PLACES))}
    for line in sorted(places):
        models, references, x = made_halved(build)
        place = device()
        before = attributes(models)
        managed = set_up(models, device=place, **settings) if release else None
        if managed is not None:
            check(models, references, x)
        try:
            with interrupted_at(line, FILES):
                if managed is None:
                    managed = set_up(models, device=place, **settings)
                else:
                    managed.release()
        except KeyboardInterrupt:
            hits += 1
        if managed is not None:
            managed.release()
        assert attributes(models) == before, line
        check(models, references, x)
        with set_up(models, device=place, **settings) as again:
            target = again.models[next(iter(models))].group.target.native
            check(models, references, x)
        del managed, again
        gc.collect()
        assert target.free_memory() == target.total_memory, line
    assert hits > 0.5 * len(places)  # how many lines run varies
