"""The compiler of units on a CPU: a layer's code is made once, its weights are packed once.

A deep model unrolled is thirty times the same code to generate. So what a unit does, as one graph
of operations, is cut where it enters and leaves a layer, and pieces that read the same in graphs of
one process share code: layers, and all of a pass that the sampling does not change. Calling a piece
takes some 20 microseconds, so layers of less weight than `LAYER_BYTES` stay together.

oneDNN reads a matrix of half precision at twice the rate where it has arranged it before, in one
order for any few tokens. Weights are arranged once for all graphs, and again after they were
written to; those that are applied to the same states are joined, as are levels of four bits.
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
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
PACK_BYTES = 4 << 30  # of the weights of a graph that are held once more, packed or joined
HALVES = (torch.bfloat16, torch.float16)
INT4: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
INT4_ROWS = 64  # of a block of its weights: whole blocks can stand one below the other

_code: dict[str, Callable[..., Any]] = {}  # of pieces, by what they do
_joined: Any = WeakTensorKeyDictionary()  # the first weight -> (what was joined to it, as one)


@torch.library.custom_op("draftkit::packed_linear", mutates_args=())
def packed_linear(states: Tensor, weight: Tensor) -> Tensor:
    """states [..., I] @ weight.T with a packed `weight` [O, I]: [..., O]."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, None, "none", [], "")


@packed_linear.register_fake
def _(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])


# Product -> what stands for those of the same states, and along which dimension which of its
# arguments are joined. The first kind has room first.
STANDS_FOR: dict[Any, tuple[Any, dict[int, int]]] = {
    torch._C._nn.linear: (torch.ops.draftkit.packed_linear.default, {1: 0}),
    INT4: (INT4, {1: 0, 3: 1}),
}


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
    joins = _join_products(graph) if packs else []
    parts, root = _parts(graph), torch.nn.Module()
    whole = split_module(graph, root, parts.__getitem__, keep_original_order=True)
    values = {node.name: node.meta.get("example_value") for node in graph.graph.nodes}
    children: list[Any] = list(whole.named_children())
    for name, piece in children:
        examples = [values[node.target] for node in piece.graph.find_nodes(op="placeholder")]
        called: Any = torch.nn.Module()
        called.forward = _compiled(piece, examples)
        setattr(whole, name, called)
    flat = [i for own, _ in joins for i in own]
    joined: list[Tensor] = []
    state: list[tuple[Any, int]] = []  # of the weights that `joined` is made of

    def forget(_: Any) -> None:
        joined.clear()
        state.clear()

    def run(*arguments: Any) -> Any:
        weights = [arguments[i] for i in flat]
        known = zip(state, weights, strict=True) if state else ()
        # Models of one shape share a graph: their weights may be as often written to.
        if not known or any(r() is not w or v != _version(w) for (r, v), w in known):
            joined[:] = [_join([arguments[i] for i in own], along) for own, along in joins]
            state[:] = [(weakref.ref(weight, forget), _version(weight)) for weight in weights]
        return whole.forward(*arguments, *joined)

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


def _join_products(graph: GraphModule) -> list[tuple[list[int], int]]:
    """Let products of the same states read their weights as one, which become further inputs.

    Weights of half precision are packed too, levels of four bits (`models.rounded`) are as they
    come. Returns of which inputs each is made, and along which dimension. Those of a kind are left
    as they are where they are too large to be held twice.
    """
    numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    groups, held = list[list[Node]](), 0
    for product, (_, dimensions) in STANDS_FOR.items():
        alike: dict[Any, list[Node]] = {}
        for node in graph.graph.find_nodes(op="call_function", target=product):
            if states := _joinable(node, numbers):
                alike.setdefault(states, []).append(node)
        kept = [nodes for nodes in alike.values() if product is not INT4 or len(nodes) > 1]
        read: set[Any] = {node.args[i] for nodes in kept for node in nodes for i in dimensions}
        size = sum(weight.meta["example_value"].nbytes for weight in read)
        if held + size <= PACK_BYTES:
            groups, held = groups + kept, held + size
    last, made = [*numbers][-1], list[tuple[list[int], int]]()
    for nodes in groups:
        product, dimensions = STANDS_FOR[nodes[0].target]
        arguments = [argument for argument in nodes[0].args if argument is not None]
        for index, dimension in dimensions.items():
            weights: list[Any] = [node.args[index] for node in nodes]
            values = [weight.meta["example_value"] for weight in weights]
            made.append(([numbers[weight] for weight in weights], dimension))
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"joined_{len(made)}")
            last.meta["example_value"] = torch.cat(values, dimension).detach()
            arguments[index] = last
        with graph.graph.inserting_before(nodes[0]):
            whole = graph.graph.call_function(product, tuple(arguments))
            whole.meta = dict(nodes[0].meta)
            before = 0
            for node in nodes:
                weight: Any = node.args[1]
                count = len(weight.meta["example_value"])
                own = graph.graph.call_function(torch.narrow, (whole, -1, before, count))
                own.meta, before = dict(node.meta), before + count
                node.replace_all_uses_with(own)
                graph.graph.erase_node(node)
    graph.recompile()
    return made


def _joinable(node: Node, numbers: Mapping[Node, int]) -> Any:
    """The states that a product reads, if its weights can be joined to others; else None."""
    arguments: Any = node.args
    states, weight, *others = arguments
    if weight not in numbers:
        return None
    value = weight.meta["example_value"]
    if node.target is INT4:
        states = states.args[0] if states.target == "reshape" else states  # each for itself
        return states if len(value) % INT4_ROWS == 0 else None
    return states if value.dtype in HALVES and not any(others) and not node.kwargs else None


def _join(weights: list[Tensor], dimension: int) -> Tensor:
    """`weights` as one, made once for all graphs that join the same; in half precision packed."""
    state = [(id(weight), _version(weight)) for weight in weights]
    known = _joined.get(weights[0])
    if known is None or known[0] != state:
        one = torch.cat(weights, dimension) if len(weights) > 1 else weights[0]
        is_matrix = one.ndim == 2 and one.dtype in HALVES
        known = state, torch.ops.mkldnn._reorder_linear_weight(one.detach()) if is_matrix else one
        _joined[weights[0]] = known
    return known[1]


def _version(weight: Tensor) -> int:
    """How often `weight` was written to; one made for inference alone does not count."""
    return -1 if weight.is_inference() else weight._version
