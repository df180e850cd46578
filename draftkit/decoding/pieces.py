"""The compiler of units on a CPU: a layer's code is made once, its weights are packed once.

A deep model unrolled is thirty times the same code to generate. So what a unit does, as one graph
of operations, is cut where it enters and leaves a layer, and pieces that read the same in graphs of
one process share code: layers, and all of a pass that the sampling does not change. Calling a piece
takes some 20 microseconds, so layers of less weight than `LAYER_BYTES` stay together.

oneDNN reads a matrix of half precision at twice the rate where it has arranged it before, in one
order for any few tokens. Weights are arranged once for all graphs, and again after they were
written to; those that are applied to the same states are joined.
"""

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx
from torch._inductor.ir import TensorBox
from torch._inductor.mkldnn_ir import LinearUnary
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module
from torch.utils.weak import WeakTensorKeyDictionary

LAYER_BYTES = 4 << 20
PACK_BYTES = 4 << 30  # of the weights of a graph that are held once more, packed
HALVES = (torch.bfloat16, torch.float16)

_code: dict[str, Callable[..., Any]] = {}  # of pieces, by what they do
_packed: Any = WeakTensorKeyDictionary()  # the first weight -> (what was joined to it, packed)


@torch.library.custom_op("draftkit::packed_linear", mutates_args=())
def packed_linear(states: Tensor, weight: Tensor) -> Tensor:
    """states [..., I] @ weight.T with a packed `weight` [O, I]: [..., O]."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, None, "none", [], "")


@packed_linear.register_fake
def _(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


# The compiler takes packed weights as constants only; here they are inputs, which it takes for
# plain ones while it compiles.
@lowering.register_lowering(torch.ops.draftkit.packed_linear.default, type_promotion_kind=None)
def _(states: Any, weight: Any) -> Any:
    return TensorBox.create(LinearUnary.create(states, weight, None, "none", [], ""))


def by_layers(
    graph: GraphModule, inputs: Sequence[Any], *, packs: bool, options: Any = None
) -> Callable[..., Any]:
    """A backend of `torch.compile`: `graph` compiled in pieces, on packed weights or not."""
    own = Graph()  # the caller still reads its own
    own.output(own.graph_copy(graph.graph, {}))
    graph = GraphModule(graph, own)
    joined_inputs = _pack_linear(graph) if packs else []
    parts, root = _parts(graph), torch.nn.Module()
    whole = split_module(graph, root, parts.__getitem__, keep_original_order=True)
    values = {node.name: node.meta.get("example_value") for node in graph.graph.nodes}
    children: list[Any] = list(whole.named_children())
    for name, piece in children:
        examples = [values[node.target] for node in piece.graph.find_nodes(op="placeholder")]
        called: Any = torch.nn.Module()
        called.forward = _compiled(piece, examples)
        setattr(whole, name, called)
    flat = [i for joined in joined_inputs for i in joined]
    packed: list[Tensor] = []
    state: list[tuple[Any, int]] = []  # of the weights that `packed` is made of

    def forget(_: Any) -> None:
        packed.clear()
        state.clear()

    def run(*arguments: Any) -> Any:
        weights = [arguments[i] for i in flat]
        known = zip(state, weights, strict=True) if state else ()
        # Models of one shape share a graph: their weights may be as often written to.
        if not known or any(r() is not w or v != _version(w) for (r, v), w in known):
            packed[:] = [_pack([arguments[i] for i in joined]) for joined in joined_inputs]
            state[:] = [(weakref.ref(weight, forget), _version(weight)) for weight in weights]
        return whole.forward(*arguments, *packed)

    return run


def _compiled(piece: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The code of a piece, made unless another does the same to tensors of the same shapes."""
    numbers = {node: f"%{i}" for i, node in enumerate(piece.graph.nodes)}
    does = [str((e.shape, e.stride(), e.dtype, e.storage_offset())) for e in examples]
    for node in piece.graph.nodes:
        target = None if node.op in ("placeholder", "output") else node.target
        if node.op == "get_attr":
            target = id(getattr(piece, node.target))
        arguments = map_arg((node.args, node.kwargs), numbers.__getitem__)
        does.append(f"{node.op} {target} {'' if node.op == 'placeholder' else arguments}")
    text = "\n".join(does)
    if text not in _code:
        made: Any = compile_fx(piece, examples)
        _code[text] = made
    return _code[text]


def _parts(graph: GraphModule) -> dict[Node, int]:
    """Which piece each operation belongs to: those of heavy layers are pieces of their own."""
    layers = {node: _layer(node) for node in graph.graph.nodes}
    weights: dict[str, set[Node]] = {}
    for node, layer in layers.items():
        weights.setdefault(layer, set()).update(
            read for read in node.all_input_nodes if read.op == "placeholder"
        )
    heavy = {
        layer
        for layer, read in weights.items()
        if layer and sum(node.meta["example_value"].nbytes for node in read) >= LAYER_BYTES
    }
    parts: dict[Node, int] = {}
    part, last = 0, ""
    for node, layer in layers.items():
        layer = layer if layer in heavy else ""
        part, last = part + (layer != last), layer
        parts[node] = part
    return parts


def _layer(node: Node) -> str:
    """The layer that an operation belongs to: the first numbered module around it, or none."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if layer := re.match(r".*?\D\d+(?=\D*$|\D+\w*$)", path):
            return layer[0]
    return ""


def _pack_linear(graph: GraphModule) -> list[list[int]]:
    """Let products with weights of half precision read packed ones, which become further inputs.

    Returns of which inputs each is made. Products of the same states are joined. None are where
    the weights are too large to be held twice.
    """
    numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    groups: dict[Node, list[Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        states, weight, *bias = node.args
        is_half = weight in numbers and weight.meta["example_value"].dtype in HALVES
        if is_half and not any(bias) and not node.kwargs:
            groups.setdefault(states, []).append(node)
    read: set[Any] = {node.args[1] for nodes in groups.values() for node in nodes}
    if sum(weight.meta["example_value"].nbytes for weight in read) > PACK_BYTES:
        return []
    last, made = [*numbers][-1], []
    for states, nodes in groups.items():
        weights: list[Any] = [node.args[1] for node in nodes]
        values = [weight.meta["example_value"] for weight in weights]
        made.append([numbers[weight] for weight in weights])
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"packed_{len(made)}")
        rows = [len(value) for value in values]
        last.meta["example_value"] = values[0].new_empty(sum(rows), values[0].shape[1])
        with graph.graph.inserting_before(nodes[0]):
            joined = graph.graph.call_function(
                torch.ops.draftkit.packed_linear.default, (states, last)
            )
            joined.meta = dict(nodes[0].meta)
            before = 0
            for node, count in zip(nodes, rows, strict=True):
                own = graph.graph.call_function(torch.narrow, (joined, -1, before, count))
                own.meta, before = dict(node.meta), before + count
                node.replace_all_uses_with(own)
                graph.graph.erase_node(node)
    graph.recompile()
    return made


def _pack(weights: list[Tensor]) -> Tensor:
    """`weights` one below the other, packed once for all graphs that join the same."""
    state = [(id(weight), _version(weight)) for weight in weights]
    known = _packed.get(weights[0])
    if known is None or known[0] != state:
        joined = torch.cat(weights) if len(weights) > 1 else weights[0]
        known = state, torch.ops.mkldnn._reorder_linear_weight(joined.detach())
        _packed[weights[0]] = known
    return known[1]


def _version(weight: Tensor) -> int:
    """How often `weight` was written to; one made for inference alone does not count."""
    return -1 if weight.is_inference() else weight._version
