"""Where rounds are cut: every case of a few tokens against the sentence that defines it."""

import itertools

import pytest
import torch

from draftkit.decoding.round import cut_round

VOCAB_SIZE = 3
Row = tuple[tuple[int, ...], int, int]  # candidates, accepted, remaining


def cut_by_hand(row: Row, eos: tuple[int, ...]) -> tuple[int, int, bool, bool]:
    """emitted, committed, ended, done: keep the first end of text, nothing after it."""
    candidates, accepted, remaining = row
    emitted: list[int] = []
    for token in candidates[: accepted + 1]:
        emitted.append(token)
        if token in eos:
            break
    committed = emitted[:remaining]
    ended = committed[-1] in eos
    return len(emitted), len(committed), ended, ended or len(committed) == remaining


@pytest.mark.parametrize("eos", [(), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_every_round_of_a_few_tokens_is_cut_as_by_hand(gamma: int, eos: tuple[int, ...]) -> None:
    tokens = itertools.product(range(VOCAB_SIZE), repeat=gamma + 1)
    rows: list[Row] = list(itertools.product(tokens, range(gamma + 1), range(1, gamma + 3)))
    candidates, accepted, remaining = zip(*rows, strict=True)
    cut = cut_round(
        torch.tensor(candidates),
        accepted=torch.tensor(accepted),
        remaining=torch.tensor(remaining),
        eos_token_ids=torch.tensor(eos, dtype=torch.long),
    )
    found = list(zip(*(part.tolist() for part in cut), strict=True))
    assert found == [cut_by_hand(row, eos) for row in rows]


def test_an_end_of_text_beyond_the_length_limit_is_emitted_but_ends_nothing() -> None:
    cut = cut_round(
        torch.tensor([[5, 6, 9]]),
        accepted=torch.tensor([2]),
        remaining=torch.tensor([2]),
        eos_token_ids=torch.tensor([9]),
    )
    assert [part.tolist() for part in cut] == [[3], [2], [False], [True]]
