"""What crosses the end of a turn in a graph: values that a block reads or makes and that live on when its weights do not.

    enter(turn, order, weights)
      y = linear(x, weight)         x was there before, y is used behind the leave: both cross
      cache.copy_(y)                cache was there before, and may have been written: it crosses
    leave(turn, order, weights, [x, y, cache])

Found in the graph itself, before a backend gets it, and not in arguments and results: what a block gives in an object of its
own class, keeps on itself, or writes into a buffer of the model is in the graph just the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

__all__ = ["cross", "crossing_backend"]

Backend = Callable[..., Any]


def crossing_backend(backend: Any, enter: object, leave: object) -> Backend:
    """The backend, given graphs whose turns end behind what crosses."""

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        cross(graph, enter, leave)
        return backend(graph, inputs)  # type: ignore[no-any-return]

    # The compiler asks for these.
    compile_graph.__name__ = backend.compiler_name
    for attribute in ("reset", "get_compiler_config"):
        if hasattr(backend, attribute):
            setattr(compile_graph, attribute, getattr(backend, attribute))
    return compile_graph


def cross(module: GraphModule, enter: object, leave: object) -> None:
    """Gives every `leave` in the graph, and in graphs within it, what crosses it."""
    for part in module.modules():
        if isinstance(part, GraphModule) and _cross(part.graph, enter, leave):
            part.recompile()


def _cross(graph: Graph, enter: object, leave: object) -> bool:
    nodes = list(graph.nodes)
    order = {node: number for number, node in enumerate(nodes)}
    last = {node: max((order[user] for user in node.users), default=-1) for node in nodes}
    turns = [node for node in nodes if node.target in (enter, leave)]
    own = {node for turn in turns for node in turn.all_input_nodes}
    """Weights, turns and orders: the operators have them."""
    opened: list[int] = []
    for turn in turns:
        if turn.target is enter:
            opened.append(order[turn])
            continue
        first, end = opened.pop(), order[turn]
        crossing: dict[Node, None] = {}
        for node in nodes[first + 1 : end]:
            for given in node.all_input_nodes:
                # What gives a number is not a tensor that can cross: what it is computed from crosses for it.
                if order[given] < first or (last[node] > end and not _is_tensor(node)):
                    crossing[given] = None
            if last[node] > end:
                crossing[node] = None
        turn.args = (*turn.args[:3], [node for node in crossing if node not in own and _is_tensor(node)])
    return bool(turns)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)
