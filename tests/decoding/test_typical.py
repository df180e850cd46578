"""Typical acceptance: what it keeps, of chains and of trees, and that it is seen to be lossy."""

import math
from typing import Any

import pytest
import torch

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer, ParallelProposer
from draftkit.decoding.trees import Tree, longest, tree_of
from draftkit.theory.verification import typical_bound, typical_verification
from tests.decoding.checks import ALL, GREEDY, PLAIN, PROMPT, Parts, Setting, check_law, served
from tests.decoding.driving import DRAFT, drive, request, strict_compiler
from tests.decoding.mutants import TREE
from tests.tabular import TabularAdapter, random_adapter, relative, with_masks
from tests.theory.laws import LawBroken

EPSILON = 0.3


def bound(law: torch.Tensor) -> float:
    entropy = -sum(float(p) * math.log(p) for p in law.tolist() if p > 0)
    return min(EPSILON, math.sqrt(EPSILON) * math.exp(-entropy))


def test_the_bound_follows_the_entropy() -> None:
    laws = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    found = typical_bound(target_probs=laws, epsilon=EPSILON).tolist()
    assert found == pytest.approx([bound(law) for law in laws], abs=1e-12)
    assert found[0] == pytest.approx(math.sqrt(EPSILON) / 4)
    assert found[1] == EPSILON


def test_proposals_are_kept_while_they_are_typical_and_the_likeliest_token_follows() -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)  # bound 0.3 -> 0.176
    probs = law.expand(4, 4, -1)
    tokens = torch.tensor([[1, 0, 1], [1, 2, 0], [3, 0, 0], [0, 0, 0]])
    lengths = torch.tensor([3, 3, 3, 2])
    result = typical_verification(
        target_probs=probs, draft_tokens=tokens, lengths=lengths, epsilon=EPSILON
    )
    assert result.accepted.tolist() == [3, 1, 0, 2]
    assert result.next_token.tolist() == [0] * 4


def test_of_the_longest_paths_the_likeliest_wins() -> None:
    tree = tree_of([0, 0, 1, 2, 2], [0, 1, 0, 0, 1])
    log_probs = torch.tensor([[0.0, -1, -2, -3, -2, -1]]).expand(4, -1)
    passes = torch.tensor(
        [
            [0, 1, 1, 1, 1, 1],
            [0, 1, 1, 1, 1, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 0, 1, 1, 1],
        ]
    ).bool()
    found = longest(tree, passes, log_probs).long().tolist()
    # Sums behind node 2: -4 and -3; behind node 1: -4.
    assert found[0] == [1, 0, 1, 0, 0, 1]
    assert found[1] in ([1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0])
    assert found[2] == [1, 0, 1, 0, 0, 0]
    assert found[3] == [1, 0, 0, 0, 0, 0]


def expected_round(
    target: TabularAdapter, text: list[int], tree: Tree, tokens: list[int]
) -> list[int]:
    """What a round commits, path by path."""
    fed, best = [text[-1], *tokens], ([], 0.0)
    for node in range(tree.nodes + 1):
        path = [n for n in range(1, tree.nodes + 1) if tree.seen[node, n]]
        words, total, passes = list[int](), 0.0, True
        for n in path:
            law = served(target, torch.tensor([text + words]), PLAIN)[0]
            passes &= float(law[fed[n]]) > bound(law)
            words.append(fed[n])
            total += math.log(law[fed[n]])
        if passes and (len(words), total) > (len(best[0]), best[1] if best[0] else -math.inf):
            best = (words, total)
    law = served(target, torch.tensor([text + best[0]]), PLAIN)[0]
    return [*best[0], int(law.argmax())]


@pytest.mark.parametrize("tree", [TREE, None], ids=["tree", "chain"])
def test_a_round_commits_the_longest_path_and_the_likeliest_token(tree: Tree | None) -> None:
    kept = []
    for seed in range(12):
        target = random_adapter(5, seed, spread=1.0)
        draft = with_masks(relative(target, seed + 50, spread=0.7))
        decoder = Decoder(target, slots=1, capacity=64, verification="typical", epsilon=EPSILON)
        proposer = ParallelProposer(draft, tree=tree)
        decoder.attach(DRAFT, proposer)
        given: list[list[int]] = []
        propose = proposer.propose
        proposer.propose = lambda *a, _p=propose, _g=given: (  # type: ignore[method-assign]
            _g.append((made := _p(*a)).tokens[0].tolist()) or made
        )
        text = list(PROMPT)
        (answer,) = drive(decoder, [request(text, gamma=2, new=9)])
        chain = tree_of([0, 1], [0, 0])
        for facts, tokens in zip(answer.facts, given, strict=True):
            expected = expected_round(target, text, tree or chain, tokens)
            committed = answer.text[len(text) - 2 :][: facts[0][3]]
            assert committed == expected[: len(committed)]
            assert facts[0][2] == len(expected)
            text = text + committed
            kept.append(len(expected) - 1)
    assert {*kept} >= {1, 2}


def test_the_check_of_the_law_rejects_it() -> None:
    parts = Parts(proposer=lambda draft: DraftModelProposer(draft, tree=TREE))
    with pytest.raises(LawBroken, match="joint law"):
        check_law(parts, Setting(verification="typical"))


@pytest.mark.parametrize("tree", [TREE, None], ids=["tree", "chain"])
def test_at_temperature_0_it_is_greedy_decoding(tree: Tree | None) -> None:
    target = random_adapter(8, 1)

    def texts(**options: object) -> list[list[int]]:
        decoder = Decoder(target, slots=2, capacity=64, **options)
        decoder.attach(DRAFT, DraftModelProposer(relative(target, 2), tree=tree))
        rows = [request([row], row=row, sampling=GREEDY) for row in range(4)]
        # With rows that sample beside them, code is another.
        rows += [request([row], row=row, sampling=ALL) for row in range(2)]
        return [answer.text for answer in drive(decoder, rows)][:4]

    assert texts(verification="typical", epsilon=EPSILON) == texts()


def test_units_are_whole_graphs() -> None:
    target = random_adapter(8, 1)

    def played(**options: object) -> list[list[int]]:
        how: dict[str, Any] = {"verification": "typical", "epsilon": EPSILON}
        decoder = Decoder(target, slots=3, capacity=64, **how, **options)
        decoder.attach(DRAFT, DraftModelProposer(relative(target, 2), tree=TREE))
        rows = [request([row], row=row, sampling=ALL) for row in range(3)]
        return [answer.text for answer in drive(decoder, rows)]

    eager = played()
    with strict_compiler():
        assert played(compiled=True, batch_sizes=(3,)) == eager
