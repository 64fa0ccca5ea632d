"""One graph of real components, and of models that are used as applications use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attach_models import MlpBlock, Towered, attached, host, inputs, mlp, run, same_bits
from lora_models import adapter
from lora_models import inputs as lora_inputs
from lora_models import model as lora_model
from torch import nn
from torch.utils._pytree import tree_leaves
from whole_models import ONE_GRAPH, graphs, seeded, stored

import weightstream
from weightstream import offload

pytestmark = ONE_GRAPH


def all_same(left: Any, right: Any) -> bool:
    """Whether two results hold tensors of the same bits."""
    pairs = list(zip(tree_leaves(left), tree_leaves(right)))
    return len(pairs) > 0 and all(same_bits(*pair) for pair in pairs)


def follows(make: Callable[[], nn.Module], *calls: dict[str, Any], share: float = 0.75) -> None:
    """Steps of one graph give the resident model's bits, in whatever way it is called. The backend changes no rounding."""
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    expected = [run(model, **call) for call in calls]
    with attached(model, budget=int(stored(model) * share), device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        run(model, **calls[0])
        for _ in range(2):
            for call, result in zip(calls, expected):
                assert all_same(run(model, **call), result)
        assert graphs() == 1
        assert attachment.stats()["copies"] > 0
        assert attachment.stats()["recoveries"] == 0


def test_a_flux_transformer_that_is_called_twice_a_step() -> None:
    diffusers = pytest.importorskip("diffusers")

    def make() -> nn.Module:
        return diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        )

    torch.manual_seed(1)
    common = {"hidden_states": torch.randn(1, 16, 4), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    guided = [
        {
            **common,
            "encoder_hidden_states": torch.randn(1, 8, 32),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.rand(1),
        }
        for _ in range(2)
    ]
    follows(make, *guided)


def test_a_wan_transformer_whose_rotary_embedding_writes_parts_of_tensors() -> None:
    diffusers = pytest.importorskip("diffusers")

    def make() -> nn.Module:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=64,
            ffn_dim=64,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )

    torch.manual_seed(1)
    latents, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 16, 32)
    follows(make, {"hidden_states": latents, "timestep": torch.tensor([5]), "encoder_hidden_states": text}, share=0.95)


class SteppingCache(Towered):
    """Keeps what the blocks added, and skips them when it is told to."""

    def __init__(self) -> None:
        super().__init__([MlpBlock() for _ in range(4)])
        self.added: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.stem(x)
        if skip and self.added is not None:
            return self.head(x + self.added)
        y = x
        for block in self.blocks:
            y = block(y)
        self.added = y - x
        return self.head(y)


def test_a_step_cache_that_skips_blocks() -> None:
    make, x = seeded(SteppingCache), inputs()
    resident = torch.compile(make().requires_grad_(False), fullgraph=True, backend="aot_eager")
    steps = [False, True, True, False, True]
    expected = [run(resident, x + number, skip) for number, skip in enumerate(steps)]
    model = make()
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(2):
            for (number, skip), result in zip(enumerate(steps), expected):
                assert same_bits(run(model, x + number, skip), result)
        assert attachment.stats()["copied_bytes"] > 0


@dataclass
class Given:
    """What a block gives, in a class of the model's own."""

    x: torch.Tensor
    side: torch.Tensor


class Notes:
    """Where blocks put what they compute beside it."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Noting(MlpBlock):
    """A block that gives an object, puts a tensor into another and counts in buffers of its own and of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor, notes: Notes, counted: torch.Tensor) -> Given:
        notes.kept.append(x * self.down.bias)
        self.total += self.up.bias.mean()
        counted[:1].add_(self.norm(x).mean())
        return Given(super().forward(x), x * self.down.weight[0, 0])


class Noted(Towered):
    """The model of such blocks."""

    def __init__(self) -> None:
        super().__init__([Noting() for _ in range(2)])
        self.register_buffer("counted", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, notes, sides = self.stem(x), Notes(), []
        for block in self.blocks:
            given = block(x, notes, self.counted)
            x = given.x
            sides.append(given.side)
        totals = sum(block.total for block in self.blocks)
        return self.head(x), sum(sides), sum(notes.kept), totals.clone(), self.counted.clone()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_leaves_a_block_in_any_way_is_computed_in_its_turn(backend: str) -> None:
    make, x = seeded(Noted), inputs()
    resident = make().requires_grad_(False)
    compiled = torch.compile(resident, fullgraph=True, backend=backend)
    expected = [run(resident, x), run(compiled, x), run(compiled, x)]
    torch._dynamo.reset()
    model = make()
    with attached(model, budget=int(stored(model) * 0.9), device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        for result in expected:
            assert all_same(run(model, x), result)


def test_the_end_of_a_turn_names_what_crosses_it() -> None:
    from weightstream import graph_operators

    crossing: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        ends = [node for node in graph.graph.nodes if node.target is graph_operators.leave]
        crossing.extend(len(node.args[3]) for node in ends)
        return graph.forward

    x, model = inputs(), seeded(Noted)()
    with attached(model, budget=int(stored(model) * 0.9)) as attachment:
        attachment.compile(backend=backend)
        for _ in range(2):
            run(model, x)
    # x, both buffers, and what is given, kept and counted; nothing that only lives within the block.
    assert len(crossing) == 2 and all(5 <= count <= 8 for count in crossing), crossing


WRONG = [
    ({"mode": "fastest"}, "Unrecognized mode=fastest"),
    ({"options": {"fast": True}}, "Unexpected optimization option fast"),
    ({"options": 3}, "options=3 is no dictionary"),
    ({"mode": "default", "options": {"max_autotune": True}}, "mode= or options=, not both"),
    ({"backend": "turbo"}, "Invalid backend: 'turbo'"),
    ({"backend": None}, "backend=None is neither a name nor a function"),
    ({"dynamic": "yes"}, "dynamic='yes'"),
]


def test_settings_that_are_none_change_nothing() -> None:
    x, model = inputs(), mlp(3)
    expected = run(model, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend="eager")
        for _ in range(2):
            run(model, x)
        for settings, text in WRONG:
            with pytest.raises(weightstream.StateError, match=f"what torch.compile does not take: .*{text}"):
                attachment.compile(**settings)
            assert same_bits(run(model, x), expected)
        assert graphs() == 1


def test_options_stay_the_callers() -> None:
    x, model, options = inputs(), mlp(3), {"guard_filter_fn": lambda guards: [True] * len(guards)}
    expected = run(model, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        for _ in range(2):
            attachment.compile(backend="eager", options=options)
            for _ in range(2):
                assert same_bits(run(model, x), expected)
    assert list(options) == ["guard_filter_fn"]


def test_who_compiles_what_calls_the_model_leaves_its_graph_alone() -> None:
    x, model = inputs(), mlp(3)
    expected = run(model, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        # A backend that computes on copies of weights.
        pipeline = torch.compile(lambda x: model(x * 1.0) + 0.0, backend="aot_eager")
        for _ in range(4):
            assert same_bits(run(pipeline, x), expected + 0.0)
        assert same_bits(run(model, x), expected)


def test_no_weight_is_copied_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightstream.guard import ParameterGuard

    copied: list[str] = []
    copy_of = ParameterGuard.copy
    monkeypatch.setattr(ParameterGuard, "copy", lambda guard: (copied.append(guard.name), copy_of(guard))[1])
    x, model = inputs(), mlp(3)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend="aot_eager")
        for _ in range(3):
            run(model, x)
        assert copied == []
        assert "copy of the host's bytes" not in str(attachment.report())
        assert same_bits(model.blocks[1].up.weight.data, mlp(3).blocks[1].up.weight.data)
        assert copied == ["blocks.1.up.weight"]


def test_a_hundred_multipliers_of_an_adapter_take_one_graph(tmp_path: Any) -> None:
    x, path = lora_inputs(), adapter("lora", blocks=range(2)).write(tmp_path / "a.safetensors")
    models = [lora_model("int8", blocks=2) for _ in range(2)]
    compiled, plain = (
        weightstream.attach(made, device=host("lazy"), budget=int(stored(made) * 0.95)) for made in models
    )
    with compiled, plain:
        for made in models:
            offload.load_loras_into_model(made, path)
        compiled.compile(backend="aot_eager")
        for number in range(100):
            for made in models:
                offload.activate_loras(made, [0], [number / 50])
            torch.testing.assert_close(run(models[0], x), run(models[1], x))
        assert graphs() == 1
        assert compiled.stats()["copied_bytes"] > 0


def test_an_interrupt_while_it_compiles() -> None:
    x, model, calls = inputs(), mlp(3), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise KeyboardInterrupt
        return graph.forward

    expected = run(model, x)
    with attached(model, 0.6, device=host("lazy")) as attachment:
        attachment.compile(backend=backend)
        run(model, x)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(model, x)
        for _ in range(2):
            assert same_bits(run(model, x), expected)
    assert same_bits(run(model, x), expected)
