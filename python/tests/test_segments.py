"""Segments: where blocks are cut, where they stay whole, and that a replay finds every tensor in time."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from planning_replay import check_plan, check_replay, record
from torch import nn

from weightstream.chunks import chunks, common_ranks
from weightstream.ownership import collect
from weightstream.recorder import Recorder
from weightstream.segments import Reason, coarsen, plan_segments, small_tensors
from weightstream.towers import find_towers
from weightstream.trace import Trace

WIDTH = 16
X = torch.randn(3, WIDTH)


class Block(nn.Module):
    """A block of linear layers, registered in the order of their names, that runs the function it is given."""

    def __init__(self, names: str, run) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def stack(names: str, run, count: int = 2) -> nn.Sequential:
    model = nn.ModuleList([Block(names, run) for _ in range(count)])
    model.forward = lambda x: [x := block(x) for block in model][-1]
    return model.requires_grad_(False)


def cut(model: nn.Module, *runs, steps: int = 1):
    """Plan of a model after the given runs, checked by replay; and the segments of its first block by name."""
    ownership = collect(model, find_towers(model))
    traces: list[Trace] = []
    for run in runs or [lambda: model(X)]:
        recorder = Recorder(ownership)
        with recorder.recording():
            run()
        traces.append(recorder.trace())
    plan = plan_segments(ownership, traces)
    resident = small_tensors(ownership) | set(plan.stray)
    check_plan(ownership, plan, resident - set(plan.stray))
    coarse = plan_segments(ownership, traces, coarse=True)
    check_plan(ownership, coarse, resident - set(plan.stray))
    for trace in traces:
        check_replay(plan, trace, resident)
        check_replay(coarse, trace, resident)
    names = [
        " ".join(ownership.tensors[number].name.split(".", 1)[1].removesuffix(".weight") for number in segment.tensors)
        for segment in plan.blocks[0].segments
    ]
    return plan, names


def chain(order: str):
    """Runs the layers of a block in an order."""

    def run(self, x):
        for name in order:
            x = getattr(self, name)(x)
        return x

    return run


def test_each_child_in_order_is_a_segment():
    plan, names = cut(stack("abc", chain("abc")))
    assert names == ["a", "b", "c"] and plan.blocks[0].reason is None
    assert plan.order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_children_out_of_order_are_one_segment():
    assert cut(stack("abcd", chain("bacd")))[1] == ["a b", "c", "d"]
    assert cut(stack("abcd", chain("acbd")))[1] == ["a", "b c", "d"]
    plan, names = cut(stack("abc", chain("cba")))
    assert names == ["a b c"] and plan.blocks[0].reason is Reason.UNORDERED


def test_the_anchors_of_a_segment_are_in_the_order_of_their_calls():
    model = stack("abc", chain("bac"))
    plan, _ = cut(model)
    first = plan.blocks[0].segments[0]
    assert (first.first_anchor, first.last_anchor, first.last_calls) == (model[0].b, model[0].a, 1)


def test_a_child_called_twice_spans_what_runs_between():
    plan, names = cut(stack("abcd", chain("abacd")))
    assert names == ["a b", "c", "d"] and plan.blocks[0].segments[0].last_calls == 2
    plan, names = cut(stack("abc", chain("abca")))
    assert names == ["a b c"] and plan.blocks[0].reason is Reason.OVERLAP


def test_a_child_called_twice_in_a_row_stays_alone_and_ends_with_the_second_call():
    plan, names = cut(stack("ab", chain("aab")))
    assert names == ["a", "b"] and [segment.last_calls for segment in plan.blocks[0].segments] == [2, 1]


def test_a_call_of_an_anchor_that_reads_nothing_counts_like_one_that_does():
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x, first=True):
            return x @ self.weight if first else x

    model = stack("bc", lambda self, x: self.c(self.a(self.b(self.a(x)), first=False)))
    for block in model:
        b, c = block._modules.pop("b"), block._modules.pop("c")
        block.a, block.b, block.c = Once().requires_grad_(False), b, c
    plan, names = cut(model)
    assert names == ["a b", "c"] and plan.blocks[0].segments[0].last_calls == 2


def test_a_number_of_calls_that_changes_leaves_the_end_to_the_next_segment():
    model = stack("ab", None)
    model[0].run = chain("aab")
    calls = iter([chain("aab"), chain("aaab")])

    def run():
        model[0].run = next(calls)
        model[1].run = chain("ab")
        model(X)

    plan, names = cut(model, run, run)
    assert names == ["a", "b"] and plan.blocks[0].segments[0].last_calls is None


def test_a_read_in_the_blocks_own_forward_keeps_it_whole():
    plan, names = cut(stack("ab", lambda self, x: self.b(F.linear(x, self.a.weight))))
    assert names == ["a b"] and plan.blocks[0].reason is Reason.OWN_FORWARD and plan.blocks[0].detail == "0.a.weight"

    def joined(self, x):
        return self.o(F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight]))[:, :WIDTH])

    plan, names = cut(stack("qkvo", joined))
    assert names == ["q k v o"] and plan.blocks[0].detail == "0.q.weight, 0.k.weight, 0.v.weight"


def test_a_read_by_an_inner_parent_joins_what_runs_inside_that_parent():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
            self.child = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.child(x @ self.experts[0] + x @ self.experts[1])

    model = stack("ab", lambda self, x: self.b(self.parent(self.a(x))))
    for block in model:
        block.parent = Parent()
        del block._modules["b"]
        block.b = nn.Linear(WIDTH, WIDTH, bias=False)
    plan, names = cut(model)
    assert names == ["a", "parent.experts parent.child", "b"]
    assert plan.blocks[0].segments[1].anchors == (model[0].parent,)


def test_small_tensors_do_not_hold_a_block_together():
    model = stack("ab", lambda self, x: self.b(self.a(x) * self.scale))
    for block in model:
        block.scale = nn.Parameter(torch.ones(4).sum())
    assert cut(model)[1] == ["a", "b"]
    for block in model:
        block.scale = nn.Parameter(torch.ones(WIDTH))
    plan, names = cut(model)
    assert names == ["scale a b"] and plan.blocks[0].reason is Reason.OWN_FORWARD


def test_a_block_made_of_small_tensors_has_none():
    blocks = [nn.ModuleDict({str(n): nn.Linear(4, 4, bias=False) for n in range(200)}) for _ in range(2)]
    for block in blocks:
        block.forward = lambda x, block=block: [x := layer(x) for layer in block.values()][-1]
    model = nn.ModuleList(blocks)
    ownership = collect(model, find_towers(model, [list(model)]))
    assert small_tensors(ownership) == set()
    blocks[0]["200"] = nn.Linear(64, 1000, bias=False)
    ownership = collect(model, find_towers(model, [list(model)]))
    assert small_tensors(ownership) == set(range(200))


def test_a_tensor_never_seen_read_keeps_its_block_whole():
    plan, names = cut(stack("abc", chain("ab")))
    assert names == ["a b c"] and plan.blocks[0].reason is Reason.UNSEEN and plan.blocks[0].detail == "0.c.weight"


def test_a_tensor_read_outside_its_block_keeps_that_block_whole_and_is_named():
    model = stack("ab", chain("ab"))
    plan, names = cut(model, lambda: model(X + model[0].b.weight.sum()))
    assert names == ["a b"] and plan.blocks[0].reason is Reason.STRAY and plan.stray == [1]
    assert len(plan.blocks[1].segments) == 2


def test_stray_tensors_that_were_made_resident_do_not_keep_their_block_whole():
    model = stack("abc", chain("abc"))
    ownership, trace, _ = record(model, lambda: model(X + model[0].b.weight.sum()))
    plan = plan_segments(ownership, [trace], resident={1})
    assert [segment.tensors for segment in plan.blocks[0].segments] == [(0,), (2,)] and plan.stray == []


def test_an_order_that_changes_from_step_to_step_keeps_the_block_whole():
    model = stack("abc", None)
    orders = iter(["abc", "abc", "abc", "bac"])

    def run():
        for block in model:
            block.run = chain(next(orders))
        model(X)

    plan, _ = cut(model, run, run)
    assert [entry.reason for entry in plan.blocks] == [None, Reason.ORDER]


def test_an_order_that_changes_between_visits_of_one_step_keeps_the_block_whole():
    model = stack("ab", chain("ab"))

    def run():
        model(X)
        model[1].run = chain("ba")
        model(X)

    plan, _ = cut(model, run)
    assert [entry.reason for entry in plan.blocks] == [None, Reason.ORDER]
    assert plan.order == [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)]


def test_a_visit_that_leaves_something_out_agrees_with_one_that_does_not():
    model = stack("abcd", chain("abcd"), 2)

    def run():
        model(X)
        model[0].run = chain("ad")
        model(X)

    plan, names = cut(model, run)
    assert names == ["a", "b", "c", "d"]
    assert plan.order[8:] == [(0, 0), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_blocks_inside_one_another_stay_whole():
    model = stack("ab", chain("ab"))
    model[0].run = lambda self, x: self.b(model[1](self.a(x)))
    plan, _ = cut(model, lambda: model[0](X))
    assert [entry.reason for entry in plan.blocks] == [Reason.NESTED, Reason.NESTED]


def test_a_block_that_was_not_visited_is_whole_and_not_expected():
    model = stack("ab", chain("ab"), 3)
    plan, _ = cut(model, lambda: model[2](model[0](X)))
    assert [entry.reason for entry in plan.blocks] == [None, Reason.NOT_VISITED, None]
    assert {block for block, _ in plan.order} == {0, 2}


def test_an_incomplete_trace_is_no_evidence():
    model = stack("ab", chain("ab"))
    ownership, trace, _ = record(model, lambda: model(X))
    trace.complete = False
    plan = plan_segments(ownership, [trace])
    assert {entry.reason for entry in plan.blocks} == {Reason.NOT_VISITED} and plan.order == []


def test_a_block_of_one_layer_has_one_segment_at_that_layer():
    plan, names = cut(stack("a", chain("a")))
    assert names == ["a"] and plan.blocks[0].reason is None


def test_a_leaf_as_a_block_and_in_one():
    leaves = nn.ModuleList([nn.LSTM(WIDTH, WIDTH) for _ in range(2)])
    leaves.forward = lambda x: [x := leaf(x)[0] for leaf in leaves]
    assert {entry.reason for entry in cut(leaves)[0].blocks} == {Reason.OWN_FORWARD}
    model = stack("ab", lambda self, x: self.b(self.attention(self.a(x), x, x)[0]))
    for block in model:
        block.attention = nn.MultiheadAttention(WIDTH, 2)
        del block._modules["b"]
        block.b = nn.Linear(WIDTH, WIDTH, bias=False)
    names = cut(model)[1]
    assert [name.split()[0] for name in names] == ["a", "attention.in_proj_weight", "b"]


def test_coarser_segments_have_their_least_size_and_the_same_replay():
    model = stack("abcdefg", chain("abacdefg"))
    ownership, trace, _ = record(model, lambda: model(X))
    fine = plan_segments(ownership, [trace])
    size = WIDTH * WIDTH * 4
    for least in (0, size, 2 * size, 3 * size, 100 * size):
        plan = coarsen(fine, ownership, least)
        check_plan(ownership, plan, set())
        assert check_replay(plan, trace, set()) == plan.order
        sizes = [len(segment.tensors) * size for segment in plan.blocks[0].segments]
        assert len(sizes) == 1 or min(sizes) >= least
    assert [len(s.tensors) for s in coarsen(fine, ownership, 3 * size).blocks[0].segments] == [3, 4]


def test_a_block_that_repeats_stays_in_the_order_when_made_coarser():
    model = stack("ab", chain("ab"), 2)
    ownership, trace, _ = record(model, lambda: (model[0](X), model[0](X)))
    assert coarsen(plan_segments(ownership, [trace]), ownership, 1 << 20).order == [(0, 0), (0, 0)]


def test_chunks_are_the_most_that_sort():
    generator = random.Random(1)
    for _ in range(300):
        ranks = [generator.randrange(5) for _ in range(generator.randrange(1, 8))]
        found = chunks(ranks)
        assert [index for first, last in found for index in range(first, last)] == list(range(len(ranks)))
        legal = [i for i in range(1, len(ranks)) if max(ranks[:i]) < min(ranks[i:])]
        assert [first for first, _ in found[1:]] == legal


@pytest.mark.parametrize(
    ("sequences", "ranks"),
    [
        ([[{1}, {2}, {3}]], [0, 1, 2]),
        ([[{2}, {1, 3}]], [1, 0, 1]),
        ([[{1}, {2}, {3}], [{1}, {3}]], [0, 1, 2]),
        ([[{1}, {2}], [{2, 3}]], [0, 1, 1]),
        ([[{1}, {2}, {3}], [{1, 3}, {2}]], [0, 0, 0]),
        ([[{3}, {1}], [{3}, {2}]], [1, 2, 0]),
        ([[{1}, {2}], [{2}, {1}]], None),
        ([[{1}, {2}], [{2}, {3}], [{3}, {1}]], None),
    ],
)
def test_one_order_for_several_sequences(sequences, ranks):
    found = common_ranks(sequences, [1, 2, 3])
    assert (found and [found[number] for number in (1, 2, 3)]) == ranks


class Tree(nn.Module):
    """A random module tree whose forward calls children, repeats some, and reads some weights by itself."""

    def __init__(self, generator: random.Random, depth: int) -> None:
        super().__init__()
        kids = generator.randrange(1, 4) if depth else 0
        for number in range(kids):
            nested = generator.random() < 0.4
            setattr(self, f"kid{number}", Tree(generator, depth - 1) if nested else nn.Linear(WIDTH, WIDTH, bias=False))
        if generator.random() < 0.3 or not kids:
            self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.calls = [f"kid{number}" for number in range(kids)]
        if generator.random() < 0.3:
            generator.shuffle(self.calls)
        if kids and generator.random() < 0.2:
            self.calls.append(generator.choice(self.calls))
        self.peek = kids > 0 and generator.random() < 0.15
        self.skip = generator.random() < 0.15
        self.generator = generator

    def forward(self, x):
        if hasattr(self, "own"):
            x = x @ self.own
        for name in self.calls:
            if not (self.skip and self.generator.random() < 0.5):
                x = getattr(self, name)(x)
        if self.peek:
            x = x + sum(weight.sum() for weight in self.kid0.parameters())
        return torch.tanh(x)


def test_random_blocks_replay_without_a_missing_tensor():
    shapes = set()
    for seed in range(150):
        generator = random.Random(seed)
        torch.manual_seed(seed)
        model = nn.ModuleList([Tree(generator, 3) for _ in range(2)]).requires_grad_(False)
        model.forward = lambda x, model=model: model[1](model[0](x))
        plan, _ = cut(model, *[lambda: model(X)] * generator.randrange(1, 4))
        shapes.update((min(len(entry.segments), 3), entry.reason) for entry in plan.blocks)
    assert {count for count, _ in shapes} == {1, 2, 3}
    assert {reason for _, reason in shapes} >= {None, Reason.OWN_FORWARD, Reason.OVERLAP, Reason.UNSEEN}
