"""Trees: how they are made and chosen, and that rounds of them have the target's law.

`test_mutants.py` shows what the law's check rejects.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.proposers import DraftModelProposer, HeadProposer, ParallelProposer, drafting
from draftkit.decoding.round import RoundInputs, propose
from draftkit.decoding.trees import MOST_NODES, Tree, chosen_tree, tree_of
from draftkit.models.adapter import CausalAdapter
from draftkit.models.heads import EAGLE3, MEDUSA
from tests import tiny
from tests.decoding.checks import (
    ALL,
    GREEDY,
    PENALTY,
    PLAIN,
    PROMPT,
    Parts,
    Setting,
    build,
    check_law,
    check_sampled,
    served,
)
from tests.decoding.driving import (
    DRAFT,
    SMALL,
    Answer,
    Schedule,
    assert_same,
    drive,
    head,
    request,
    strict_compiler,
)
from tests.decoding.measuring import Rows
from tests.decoding.mutants import TREE
from tests.tabular import TabularHead, random_adapter, relative, with_masks
from tests.theory import checks as theory_checks

# Making and choosing


def test_nodes_are_numbered_level_by_level_those_with_children_first() -> None:
    tree = tree_of([0, 3, 0, 3, 4], [1, 0, 0, 2, 1])
    assert (tree.parents, tree.ranks) == ((0, 0, 1, 1, 3), (0, 1, 2, 0, 1))
    assert (tree.starts, tree.inner, tree.depth, tree.width) == (
        (0, 1, 3, 5, 6),
        (1, 1, 1, 0),
        3,
        3,
    )
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.children.tolist() == [[1, 2], [4, 3], [0, 0], [5, 0], [0, 0], [0, 0]]
    paths = [[n for n, on in enumerate(row) if on] for row in tree.seen.tolist()]
    assert paths == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]


@pytest.mark.parametrize(
    ("parents", "ranks", "said"),
    [
        ([2, 1], [0, 0], "node 1 comes behind itself: every path begins at node 0"),
        ([0, 7], [0, 0], "node 2 has no parent 7"),
        ([0, 0], [1, 1], "two nodes of one parent have the same rank"),
        ([0], [-1], "every node of a tree has a rank"),
        ([], [], "a tree has 1 to 64 nodes, this one has 0"),
        ([*range(MOST_NODES + 1)], [0] * (MOST_NODES + 1), "this one has 65"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], ranks: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=f"^decode.tree: .*{said}"):
        tree_of(parents, ranks)


def reach(tree: Tree, acceptance: Sequence[Sequence[float]]) -> float:
    """The expected number of accepted tokens."""
    chances = [1.0]
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True), 1):
        chances.append(chances[parent] * acceptance[int(tree.depths[node]) - 1][rank])
    return sum(chances[1:])


def test_the_chosen_tree_has_the_most_accepted_tokens_of_all() -> None:
    """Of all trees of four nodes, with rates that neither fall by rank nor by depth."""
    acceptance = [[0.5, 0.1, 0.3], [0.2, 0.6], [0.9]]
    best = max(
        reach(tree, acceptance)
        for parents in product(*(range(n + 1) for n in range(4)))
        for ranks in product(range(3), repeat=4)
        if (tree := _if_any(parents, ranks)) is not None
        and tree.depth <= 3
        and all(r < len(acceptance[tree.depths[n] - 1]) for n, r in enumerate(tree.ranks, 1))
    )
    assert reach(chosen_tree(acceptance, 4), acceptance) == pytest.approx(best, abs=1e-12)


def _if_any(parents: Sequence[int], ranks: Sequence[int]) -> Tree | None:
    try:
        return tree_of(parents, ranks)
    except ValueError:
        return None


def test_a_chosen_tree_leaves_out_what_is_never_reached() -> None:
    assert chosen_tree([[0.7, 0.0], [0.0]], 9).nodes == 1
    assert chosen_tree([[0.0]], 9).nodes == 1


# The law


def every_tree() -> Iterator[Tree]:
    """All trees of depth 2 whose nodes have at most three children, over ranks 0, 1 and 2."""
    below = [ranks for n in range(8) if (ranks := [r for r in range(3) if n >> r & 1]) or n == 0]
    for first in below[1:]:
        for second in product(below, repeat=len(first)):
            if any(second):
                parents = [0] * len(first) + [n for n, s in enumerate(second, 1) for _ in s]
                yield tree_of(parents, [*first, *(rank for s in second for rank in s)])


def uniforms_of(setting: Setting, text: tuple[int, ...], words: Sequence[int]) -> list[float]:
    """The middle of the numbers by which the target itself says `words` after `text`."""
    found = []
    for n, word in enumerate(words):
        before = torch.tensor([[*PROMPT, *text, *words[:n]]])
        law = served(setting.target, before, setting.samplings[0])[0]
        found.append(float(law[:word].sum() + law[word] / 2))
    return found


@pytest.mark.parametrize(
    ("sampling", "step"),
    [(PLAIN, 24), (PENALTY, 24), pytest.param(PLAIN, 1, marks=pytest.mark.soak)],
    ids=["some", "some, with a penalty", "all"],
)
def test_every_tree_of_depth_two_says_what_the_target_says_in_two_rounds(
    sampling: SamplingConfig, step: int
) -> None:
    """Each number that a round draws stands for a token of the target: 27 triples, twice.

    Whatever the tree holds, a round commits the first of them, so that its law is exact; the second
    round also reads what the first one left in the caches.
    """
    setting = Setting(samplings=(sampling,), tokens=6)
    triples = [*product(range(3), repeat=3)]
    drawn = {
        (text, triple): uniforms_of(setting, text, triple)
        for text in [(), *(one[:n] for n in (1, 2, 3) for one in triples)]
        for triple in triples
    }
    trees = [*every_tree()]
    assert len(trees) == 721
    for tree in trees[::step]:
        made = build(
            Parts(proposer=lambda draft, tree=tree: ParallelProposer(with_masks(draft), tree=tree)),
            [setting.request(0, ())],
            target=setting.target,
            draft=setting.draft(),
        )
        rows, texts = Rows(made), [()]
        for _ in range(2):
            rows = rows.take(torch.arange(len(texts)).repeat_interleave(27))
            both = [(text, triple) for text in texts for triple in triples]
            rows.force(torch.tensor([drawn[one] for one in both], dtype=torch.float64))
            outcome = rows.outcome()
            said = [tuple(t for t in row if t >= 0) for row in outcome.text.tolist()]
            assert all(
                new == triple[: len(new)] for new, (_, triple) in zip(said, both, strict=True)
            )
            assert [len(new) - 1 for new in said] == outcome.accepted.tolist()
            assert outcome.accepted.max() == 2
            texts = [text + new for new, (text, _) in zip(said, both, strict=True)]
            assert len({*texts}) > 1


SETTING = Setting(samplings=(PLAIN, ALL))


def test_the_joint_law_is_the_targets_and_rounds_know_the_text_alone() -> None:
    """Of a draft, of laws by depth, and of greedy rows."""
    own = Parts(proposer=lambda draft: DraftModelProposer(draft, tree=TREE))
    result = check_law(own, SETTING)
    assert set(result.cells.outcome.accepted.tolist()) == {0, 1, 2}
    by_depth = Parts(proposer=lambda draft: ParallelProposer(with_masks(draft), tree=TREE))
    check_law(by_depth, replace(SETTING, samplings=(ALL, PENALTY, GREEDY), eos=(2,)))
    greedy = (GREEDY, replace(PENALTY, temperature=0.0))
    check_law(own, Setting(gamma=2, tokens=4, samplings=greedy, eos=(2,)))


@pytest.mark.parametrize("depth", [2, 3])
def test_decoded_rows_have_the_targets_law(depth: int) -> None:
    tree = TREE if depth == 2 else tree_of([0, 0, 1, 2, 3, 3], [0, 1, 1, 0, 0, 2])
    parts = Parts(proposer=lambda draft: DraftModelProposer(draft, tree=tree))
    check_sampled(parts, theory_checks.adversarial_tables(), rows=20_000)


@pytest.mark.parametrize("kind", ["draft", "head", "head in one pass"])
def test_a_node_holds_the_likeliest_tokens_behind_its_own_path(kind: str) -> None:
    target = random_adapter(8, 1)
    model = relative(target, 2)
    drafter: Any = model if kind == "draft" else TabularHead(model, parallel=kind != "head")
    tree = tree_of([0, 0, 0, 1, 2, 2, 3, 5, 6], [0, 2, 1, 1, 0, 3, 2, 1, 0])
    text, made = [3, 1, 4, 1, 5], DraftModelProposer if kind == "draft" else HeadProposer
    decoder = Decoder(target, slots=1, capacity=64)
    proposer = made(drafter, tree=tree)
    decoder.attach(DRAFT, proposer)
    decoder.join([request(text, gamma=3)])
    while decoder.prefill():
        pass
    (group,) = decoder._groups()
    with torch.inference_mode():
        proposal = propose((proposer, decoder), RoundInputs(group, decoder.capacity))
    tokens = [text[-1], *proposal.tokens[0].tolist()]
    for node in range(1, tree.nodes + 1):
        path = [tokens[n] for n in range(1, node) if tree.seen[node, n]]
        whole = torch.tensor(text + path)
        laws = model.logits(whole[None])[0, -1]
        if kind != "draft":
            laws = drafter.law(whole, len(path))
        assert laws.topk(4).indices[tree.ranks[node - 1]] == tokens[node]


# Models

WIDE = chosen_tree([[0.5, 0.2, 0.1, 0.1], [0.4, 0.2, 0.1], [0.4, 0.2]], 12)


def said(
    target: CausalAdapter,
    proposer: DraftModelProposer,
    sampling: SamplingConfig = GREEDY,
    *,
    gamma: int = 3,
    slots: int = 3,
    capacity: int = 200,
    **options: Any,
) -> list[Answer]:
    """What ragged rows say, and in how many rounds."""
    decoder = Decoder(target, slots=slots, capacity=capacity, **options)
    decoder.attach(DRAFT, proposer)
    requests = [
        request(prompt, gamma=gamma, new=12 + row, row=row, sampling=sampling)
        for row, prompt in enumerate(tiny.prompts([1, 14, 6, 9, 3], seed=0))
    ]
    return drive(decoder, requests)


def answers(
    architecture: str,
    *,
    tree: Tree | None = WIDE,
    sampling: SamplingConfig = GREEDY,
    **options: Any,
) -> tuple[list[list[int]], float]:
    """What ragged rows say, and the tokens a round."""
    target, draft = tiny.pair(architecture, **(SMALL if architecture == "llama" else {}))
    proposer = DraftModelProposer(draft, tree=tree)
    done = said(target, proposer, sampling, eos_token_ids=[200], capacity=96, **options)
    rounds = sum(len(one.facts) for one in done)
    return [one.text for one in done], sum(len(one.text) for one in done) / rounds


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gemma2"])
def test_greedy_answers_are_those_of_plain_decoding(architecture: str) -> None:
    """Also of layers that see a window alone, and of learned positions."""
    plain, _ = answers(architecture, gamma=0)
    found, tokens_a_round = answers(architecture)
    assert found == plain
    assert tokens_a_round > 1.3


def test_answers_do_not_depend_on_the_rows_beside_them() -> None:
    found, _ = answers("llama", sampling=PLAIN)
    for slots, late in ((1, False), (5, True)):
        assert answers("llama", sampling=PLAIN, slots=slots, late=late)[0] == found


def test_a_tree_accepts_more_than_its_first_path() -> None:
    chain = tree_of([0, 1, 2], [0, 0, 0])
    assert answers("llama")[1] > answers("llama", tree=chain)[1]


def test_a_chain_as_a_tree_says_what_matching_says_of_the_chain() -> None:
    """The drafts' likeliest tokens, verified by the target's samples with the same numbers."""
    chain, _ = answers("llama", tree=tree_of([0, 1, 2], [0, 0, 0]), sampling=PLAIN)
    target, draft = tiny.pair("llama", **SMALL)
    argmax = DraftModelProposer(draft, tokens="argmax")
    found = said(target, argmax, PLAIN, eos_token_ids=[200], capacity=96, verification="match")
    assert [one.text for one in found] == chain


def test_a_policy_takes_the_whole_tree_or_nothing() -> None:
    policy: AdaptiveGamma = Schedule([0, 1, 3])
    target, draft = tiny.pair("llama", **SMALL)
    decoder = Decoder(target, slots=1, capacity=96)
    decoder.gamma_policy = policy
    decoder.attach(DRAFT, DraftModelProposer(draft, tree=WIDE))
    (answer,) = drive(decoder, [request([5, 6], gamma=3, adapts=True, sampling=GREEDY)])
    gammas = [fact[0][0] for fact in answer.facts]
    assert gammas[:3] == [0, WIDE.depth, WIDE.depth]
    plain = Decoder(target, slots=1, capacity=96)
    (expected,) = drive(plain, [request([5, 6], gamma=0, sampling=GREEDY)])
    assert answer.text == expected.text


@pytest.mark.parametrize("sampling", [GREEDY, ALL], ids=["greedy", "all"])
def test_units_of_a_tree_are_whole_graphs(sampling: SamplingConfig) -> None:
    found, _ = answers("llama", sampling=sampling)
    with strict_compiler() as backend:
        compiled, _ = answers("llama", sampling=sampling, compiled=True, batch_sizes=(3,))
        assert backend.made == 2
    assert compiled == found


def test_what_cannot_verify_a_tree_refuses_it() -> None:
    target, draft = tiny.pair("llama", **SMALL)
    decoder = Decoder(target, slots=1, capacity=96, verification="block")
    with pytest.raises(ValueError, match=r"^decode.verification=block judges one chain"):
        decoder.attach(DRAFT, DraftModelProposer(draft, tree=WIDE))


# Heads on the target's hidden states


WIDEST = tree_of([0] * 30 + [*range(1, 31)] + [31] * 4, [*range(30)] + [0] * 30 + [*range(4)])
kinds = pytest.mark.parametrize("kind", [EAGLE3, "p-eagle", MEDUSA])


@kinds
def test_greedy_answers_with_a_tree_of_a_head_are_those_of_plain_decoding(kind: str) -> None:
    target, draft = head(kind)
    plain = said(target, drafting(draft), gamma=0)
    found = said(target, drafting(draft, tree=WIDEST))
    assert [one.text for one in found] == [one.text for one in plain]
    committed = [fact[0][3] for one in found for fact in one.facts]
    assert max(committed) > 1


@kinds
def test_a_chain_as_a_tree_of_a_head_is_its_chain(kind: str) -> None:
    """Proposals too: the law of a node is that of the token behind its path."""
    target, draft = head(kind)
    tree = tree_of([0, 1, 2], [0, 0, 0])
    for sampling in (GREEDY, PLAIN):
        chain = said(target, drafting(draft, tokens="argmax"), sampling, verification="match")
        found = said(target, drafting(draft, tree=tree), sampling)
        assert_same(found, chain, atol=1e-4)


@kinds
def test_proposals_of_a_head_depend_on_the_text_alone(kind: str) -> None:
    """What neither model made of rejected nodes stays: rows freshly fed get the same tree."""
    target, draft = head(kind)

    def tree_after(prompt: Sequence[int], rounds: int) -> tuple[list[int], Tensor, int]:
        """The text after some rounds, the next tree, and the most tokens of a round."""
        decoder = Decoder(target, slots=1, capacity=256)
        decoder.attach(DRAFT, drafting(draft, tree=WIDEST))
        decoder.join([request(prompt, gamma=3, new=40, seed=2)])
        while decoder.prefill():
            pass
        committed = [decoder.round()[0].committed[0] for _ in range(rounds)]
        (group,) = decoder._groups()
        with torch.inference_mode():
            inputs, _ = decoder._propose(RoundInputs(group, decoder.capacity))
        text = decoder.state.tokens[0, : decoder.state.length[0]].tolist()
        return text, inputs.proposal.tokens, max(committed, default=0)

    most = 0
    for rounds in range(1, 9):
        text, tree, committed = tree_after([5, 6, 7], rounds)
        assert tree_after(text, 0)[1].tolist() == tree.tolist()
        most = max(most, committed)
    assert most > 1


def test_units_of_a_tree_of_a_head_are_whole_graphs() -> None:
    target, draft = head(EAGLE3)
    found = said(target, drafting(draft, tree=WIDE))
    with strict_compiler() as backend:
        made = said(target, drafting(draft, tree=WIDE), compiled=True, batch_sizes=(3,))
        assert backend.made == 2
    assert_same(made, found, atol=1e-5)
