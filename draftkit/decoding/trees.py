"""Trees of proposals: several guesses at a token, all of which one pass of the target tests.

A tree is the same in every round; only its tokens are new. Node 0 is the last committed token.
Nodes 1..N are proposals, each the r-th likeliest token (rank r, from 0) behind its parent. Which
nodes pay follows from how often each rank was the target's token in held-out text (Medusa, Cai et
al., arXiv 2401.10774, section 2.3.3). A round commits a path of the tree, and a token behind it.

Shapes: B rows, N nodes, D depth of the tree, W children of a node at most, V vocabulary.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.decoding.graphs import map_tensors
from draftkit.models.adapter import Adapter
from draftkit.models.cache import Branches

MOST_NODES = 64
USUAL = [0.6 * 0.4**rank for rank in range(8)]  # rates by rank, at each depth


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes level by level, in each those with children first; made by `tree_of`."""

    parents: tuple[int, ...]  # of nodes 1..N
    ranks: tuple[int, ...]  # of nodes 1..N
    starts: tuple[int, ...]  # the first node of depths 0..D, and N + 1
    inner: tuple[int, ...]  # nodes with children of depths 0..D
    depths: Tensor  # [N + 1]
    order: Tensor  # [N]: the ranks
    above: Tensor  # [N + 1] parents, 0 of node 0
    parent_index: Tensor  # [N] of the parent, among those of its depth
    children: Tensor  # [N + 1, W] of each node, the likeliest first; 0: no more
    seen: Tensor  # [N + 1, N + 1] bool: whether a node is another, or comes behind it

    @property
    def nodes(self) -> int:
        """How many proposals N it holds."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The most tokens D that one path proposes."""
        return len(self.inner) - 1

    @property
    def width(self) -> int:
        """How many ranks of a law it needs."""
        return max(self.ranks) + 1

    @property
    def key(self) -> Hashable:
        """What code depends on."""
        return (self.parents, self.ranks)

    def branches(self, first: Tensor, start: int, end: int) -> Branches:
        """How nodes `start` to `end` are read, where node 0 has slot and position `first` [B]."""
        parent_index = self.parent_index[max(0, start - 1) : end - 1]
        return Branches(first, start, self.depths, parent_index, self.seen[start:end])

    def to(self, device: torch.device) -> "Tree":
        """The same tree with its tensors on `device`."""
        return map_tensors(lambda part: part.to(device), self)


def tree_of(parents: Sequence[int], ranks: Sequence[int]) -> Tree:
    """The tree of nodes 1..N with those `parents` and `ranks`, in whatever order they stand.

    Raises ValueError, one line, for nodes that node 0 does not lead to, and for siblings of one
    rank. Its own nodes are numbered anew.
    """
    count = len(parents)
    if not 0 < count <= MOST_NODES:
        raise ValueError(f"decode.tree: a tree has 1 to {MOST_NODES} nodes, this one has {count}")
    if len(ranks) != count or min(ranks) < 0:
        raise ValueError("decode.tree: every node of a tree has a rank, 0 for the likeliest token")
    depth = {0: 0}
    for _ in range(count):
        depth |= {n: depth[p] + 1 for n, p in enumerate(parents, 1) if p in depth}
    for node, parent in enumerate(parents, 1):
        if node not in depth:
            known = "comes behind itself" if 0 < parent <= count else f"has no parent {parent}"
            raise ValueError(f"decode.tree: node {node} {known}: every path begins at node 0")
    if len({*zip(parents, ranks, strict=True)}) < count:
        raise ValueError("decode.tree: two nodes of one parent have the same rank")
    old = sorted(depth, key=lambda n: (depth[n], n not in parents, n))
    new = {node: number for number, node in enumerate(old)}
    parents = tuple(new[parents[node - 1]] for node in old[1:])
    ranks = tuple(ranks[node - 1] for node in old[1:])
    depths = [depth[node] for node in old]
    levels = range(depths[-1] + 1)
    starts = (*(depths.index(level) for level in levels), count + 1)
    below: list[list[tuple[int, int]]] = [[] for _ in old]  # ranks and numbers of children
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True), 1):
        below[parent].append((rank, node))
    width = max(map(len, below))
    seen = torch.eye(count + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, 1):
        seen[node] |= seen[parent]
    return Tree(
        parents=parents,
        ranks=ranks,
        starts=starts,
        inner=tuple(sum(bool(below[n]) for n in range(*starts[d : d + 2])) for d in levels),
        depths=torch.tensor(depths),
        order=torch.tensor(ranks),
        above=torch.tensor([0, *parents]),
        parent_index=torch.tensor([parent - starts[depths[parent]] for parent in parents]),
        children=torch.tensor(
            [([n for _, n in sorted(one)] + [0] * width)[:width] for one in below]
        ),
        seen=seen,
    )


def chosen_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of `nodes` nodes that most often holds the target's tokens.

    acceptance[d][r]: how often rank r of depth d + 1 is the target's token behind a path that is.
    The chance of a node is the product along its path, which never grows on the way: taking the
    largest that is open, one by one, is the best choice. Nodes without a chance are left out.
    """
    parents, ranks, depths, chances = list[int](), list[int](), [0], [1.0]
    waiting: list[tuple[float, int, int]] = []  # what a node would lose, its parent and rank

    def open_children(node: int) -> None:
        rates = acceptance[depths[node]] if depths[node] < len(acceptance) else ()
        for rank, rate in enumerate(rates):
            heapq.heappush(waiting, (-chances[node] * rate, node, rank))

    open_children(0)
    while waiting and len(parents) < nodes:
        loss, parent, rank = heapq.heappop(waiting)
        if loss == 0 and parents:
            break
        parents.append(parent)
        ranks.append(rank)
        depths.append(depths[parent] + 1)
        chances.append(-loss)
        open_children(len(parents))
    return tree_of(parents, ranks)


def usual_tree(nodes: int, depth: int) -> Tree:
    """The tree for a drafter of which no rates have been measured."""
    return chosen_tree([USUAL] * max(1, depth), nodes)


def walk(
    tree: Tree, rows: int, is_next: Callable[[int, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The path [B, D + 1] of nodes down from node 0 by `is_next`, and its length [B].

    is_next(depth, node [B], children [B, W]): which of the children (0: none) comes next, [B, W]
    bool. Where it is none the path goes on to first children: the first was tested, in vain.
    """
    node = torch.zeros(rows, dtype=torch.long, device=tree.depths.device)
    path, length, goes_on = [node], torch.zeros_like(node), torch.ones_like(node[:, None]) > 0
    for depth in range(tree.depth):
        children = tree.children[node]
        chosen = is_next(depth, node, children) & (children > 0) & goes_on
        goes_on = chosen.any(-1, keepdim=True)
        child = children.gather(1, chosen.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
        node = torch.where(child > 0, child, node)
        path.append(node)
        length = length + (child > 0)
    return torch.stack(path, dim=1), length


def longest(tree: Tree, passes: Tensor, log_probs: Tensor) -> Tensor:
    """The nodes [B, N + 1] bool of the longest path all of whose nodes pass, node 0 among them.

    passes, log_probs: [B, N + 1], of node 0 without meaning. Of several paths the likeliest.
    """
    passes = passes | (tree.depths == 0)
    is_open = ~(tree.seen & ~passes[:, None]).any(-1)  # [B, N + 1]
    depths = torch.where(is_open, tree.depths, -1)
    is_deepest = depths == depths.amax(-1, keepdim=True)
    along = tree.seen & (tree.depths > 0)
    total = torch.where(along, log_probs[:, None], 0.0).sum(-1)
    return tree.seen[torch.where(is_deepest, total, -torch.inf).argmax(-1)]


def check_tree(tree: Tree, target: Adapter, verification: str) -> None:
    """Raise ValueError where a decoder cannot verify `tree`."""
    if verification == "block":
        raise ValueError(
            "decode.verification=block judges one chain: use speculative, match or typical with "
            "decode.tree"
        )
    if target.has_encoder:
        raise ValueError("decode.tree: an encoder-decoder target verifies chains: use 0")
    if tree.width > target.vocab_size:
        raise ValueError(
            f"decode.tree: {tree.width} children of a node are more than the {target.vocab_size} "
            "tokens there are: use fewer nodes"
        )
