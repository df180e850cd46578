"""Guesses follow their definitions, token by token, and the text alone."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftkit.config import COUNTING_NAMES, SamplingConfig
from draftkit.decoding.catalogue import PROPOSERS
from draftkit.decoding.ngrams import CountTable, NgramMemory, PromptLookup, count_table
from draftkit.decoding.proposers import Proposer
from draftkit.theory.noise import DRAFT, sample
from tests.decoding.driving import own_laws, view_of
from tests.tabular import TabularAdapter, random_adapter

PLAIN = SamplingConfig()
GAMMA = 4


def some_texts(count: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    """Texts of 1 to `longest` random tokens."""
    dice = random.Random(seed)
    return [
        [dice.randrange(vocab_size) for _ in range(dice.randint(1, longest))] for _ in range(count)
    ]


def guessed(guesser: Proposer, texts: list[list[int]], gamma: int = GAMMA) -> list[list[int]]:
    """What is proposed after each of `texts`."""
    view = view_of(gamma, texts)
    proposal = guesser.propose(view, gamma)
    assert proposal.tokens.shape == (len(texts), gamma)
    assert 0 <= proposal.tokens.min() <= proposal.tokens.max() < 8
    pairs = zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in pairs]


@pytest.mark.parametrize("name", COUNTING_NAMES)
def test_a_proposer_that_counts_knows_the_texts_that_it_is_made_with(name: str) -> None:
    model = random_adapter(8, 1)
    made = PROPOSERS[name](lambda: model, lambda: [[3, 5, 6, 2] * 50], model)
    (tokens,) = guessed(made, [[1, 3, 5]], gamma=1)
    assert tokens[0] in ([6] if name != "unigram" else [2, 3, 5, 6])


# Tables of counts


def test_a_table_of_tokens_holds_relative_counts_and_its_smoothing_evenly() -> None:
    table = count_table([[0, 0, 1], [2]], vocab_size=4, order=1)
    expected = torch.tensor([2.25, 1.25, 1.25, 0.25]) / 5
    torch.testing.assert_close(table.exp(), expected)


def test_a_table_of_pairs_leans_on_single_tokens_and_counts_no_pair_across_texts() -> None:
    texts = some_texts(20, 5, 9, seed=1)
    flat = [token for text in texts for token in text]
    pairs = [pair for text in texts for pair in itertools.pairwise(text)]
    table = count_table(texts, vocab_size=6, order=2)
    for last, token in itertools.product(range(6), repeat=2):
        single = (flat.count(token) + 1 / 6) / (len(flat) + 1)
        follows = sum(pair[0] == last for pair in pairs)
        expected = (pairs.count((last, token)) + single) / (follows + 1)
        assert table[last, token].exp().item() == pytest.approx(expected, rel=1e-5)
    unseen = count_table(texts, vocab_size=6, order=1)
    torch.testing.assert_close(table[5], unseen)  # no token 5 was seen


def test_a_table_too_large_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"8193 x 8193 .* decode\.proposer=unigram, prompt_lookup or ngram"
    ):
        count_table([], vocab_size=8193, order=2)


def bigram(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


@pytest.mark.parametrize("order", [1, 2])
def test_a_table_proposes_from_its_served_law(order: int) -> None:
    table = bigram() if order == 2 else bigram()[0]
    view = view_of(GAMMA)
    proposal = CountTable(table).propose(view, GAMMA)
    model = TabularAdapter(table.expand(8, 8).expand(9, 8, 8))  # looks at the last token alone
    law = torch.stack(own_laws(model, proposal))
    torch.testing.assert_close(proposal.draft_probs, law)
    uniform = view.uniform(count=GAMMA, purpose=DRAFT)
    assert torch.equal(proposal.tokens, sample(probs=law, uniform=uniform))


def test_a_table_names_its_most_likely_tokens_where_all_rows_are_greedy() -> None:
    greedy = SamplingConfig(temperature=0.0)
    proposal = CountTable(bigram()).propose(view_of(2, [[3], [5]], [greedy]), 2)
    best = bigram().argmax(-1)
    assert proposal.draft_probs is None
    assert proposal.tokens.tolist() == [[best[3], best[best[3]]], [best[5], best[best[5]]]]


def test_a_table_in_half_precision_is_a_law_in_single_precision() -> None:
    table = bigram().half()
    law = CountTable(table).propose(view_of(1, [[3]]), 1).draft_probs
    assert law is not None
    assert law.dtype == torch.float32
    torch.testing.assert_close(law[0, 0], table[3].float().softmax(-1), rtol=0, atol=1e-6)


# Prompt lookup


def looked_up(text: list[int], max_ngram: int, min_ngram: int) -> list[int]:
    """The definition, token by token."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                longer = list(text)
                for _ in range(GAMMA):
                    longer.append(longer[len(longer) - (len(text) - end)])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_lookup_goes_on_after_the_last_occurrence_of_the_longest_end(
    max_ngram: int, min_ngram: int
) -> None:
    texts = some_texts(400, 4, 16, seed=2)
    lookup = PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)
    expected = [looked_up(text, max_ngram, min_ngram) for text in texts]
    assert guessed(lookup, texts) == expected
    assert 20 < sum(map(bool, expected)) < 400


def memory_of(texts: list[list[int]], **options: int) -> NgramMemory:
    memory = NgramMemory(**options)
    memory.learn(texts)
    return memory


@pytest.mark.parametrize("guesser", [PromptLookup(), memory_of(some_texts(20, 4, 16, seed=4))])
def test_lookup_and_memory_read_committed_text_alone(guesser: Proposer) -> None:
    """Whatever earlier rounds have left behind a text, the same is proposed."""
    view = view_of(GAMMA, some_texts(200, 4, 16, seed=3))
    behind = torch.arange(view.tokens.shape[1]) >= view.length[:, None]
    clean = guesser.propose(view, GAMMA)
    real = torch.arange(GAMMA) < clean.lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        left = torch.randint(4, view.tokens.shape, generator=generator)
        dirty = guesser.propose(replace(view, tokens=torch.where(behind, left, view.tokens)), GAMMA)
        assert torch.equal(clean.lengths, dirty.lengths)
        assert torch.equal(clean.tokens[real], dirty.tokens[real])


def test_a_filler_may_be_longer_than_what_is_visible() -> None:
    view = view_of(2, [[1, 2] * 12, [1, 2, 1]])
    proposal = PromptLookup().propose(replace(view, visible=8), 2)
    assert proposal.tokens[1].tolist() == [2, 1]


# The memory of past answers


def remembered(learned: list[list[int]], text: list[int], max_ngram: int) -> list[int]:
    """The definition, token by token."""
    followed: dict[tuple[int, ...], int] = {}
    for one in learned:
        for n in range(1, max_ngram + 1):
            for i in range(n, len(one)):
                followed[tuple(one[i - n : i])] = one[i]
    longer = list(text)
    for _ in range(GAMMA):
        known = [n for n in range(1, max_ngram + 1) if tuple(longer[-n:]) in followed]
        known = [n for n in known if n <= len(longer)]
        if not known:
            break
        longer.append(followed[tuple(longer[-known[-1] :])])
    return longer[len(text) :]


@pytest.mark.parametrize("max_ngram", [1, 3, 4])
def test_the_memory_says_what_followed_last_after_the_longest_known_end(max_ngram: int) -> None:
    learned, texts = some_texts(12, 7, 12, seed=5), some_texts(300, 7, 10, seed=6)
    expected = [remembered(learned, text, max_ngram) for text in texts]
    assert guessed(memory_of(learned, max_ngram=max_ngram), texts) == expected


def test_learning_piece_by_piece_is_learning_at_once_in_a_table_of_fixed_size() -> None:
    learned = some_texts(30, 5, 20, seed=7)
    at_once, by_piece = (NgramMemory(cells=64) for _ in range(2))
    place = by_piece.tokens.data_ptr()
    at_once.learn(learned)
    for text in learned:
        by_piece.learn([text])
    by_piece.learn([])
    assert torch.equal(at_once.tokens, by_piece.tokens)
    assert torch.equal(at_once.numbers, by_piece.numbers)
    assert (by_piece.tokens.data_ptr(), by_piece.tokens.shape) == (place, (4 * 64,))


def test_large_ids_are_told_apart() -> None:
    memory, big = NgramMemory(max_ngram=2), (1 << 24) - 1
    memory.learn([[big, big - 1, 5], [big - 1, big, 6], [0, big]])
    assert guessed(memory, [[big, big - 1], [big - 1, big], [7, 3]], 1) == [[5], [6], []]
    assert memory.propose(view_of(1, [[0]]), 1).tokens.item() == big
