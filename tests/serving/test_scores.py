"""A round's tensors as lists: of each row what it committed, with the alternatives it asked for."""

from dataclasses import replace

import torch

from draftkit.decoding.results import RoundResult
from draftkit.serving.scores import round_likeliest, round_scores


def result() -> RoundResult:
    """Two rows of three candidates, of which 3 and 1 count."""
    numbers = torch.arange(6.0).view(2, 3)
    ids = torch.arange(24).view(2, 3, 4)
    return RoundResult(
        slots=[4, 7],
        tokens=torch.arange(6).view(2, 3),
        committed=[3, 1],
        emitted=[3, 1],
        ended=[False, False],
        done=[False, False],
        gamma=2,
        lengths=[2, 2],
        draft_tokens=torch.zeros(2, 2),
        acceptance=torch.zeros(2, 2),
        target_log_probs=-numbers,
        log_sum_exp=numbers,
        served_log_sum_exp=numbers,
        proposer_version="v1",
        topk_ids=ids,
        topk_log_probs=-ids.float(),
        tail_mass=numbers / 10,
    )


def test_each_row_has_its_committed_tokens_and_as_many_alternatives_as_it_wants() -> None:
    first, second = round_scores(result(), [2, 0])
    assert [(score.token_id, score.log_prob) for score in first] == [(0, 0.0), (1, -1.0), (2, -2.0)]
    assert [score.top for score in first] == [
        ((0, 0.0), (1, -1.0)),
        ((4, -4.0), (5, -5.0)),
        ((8, -8.0), (9, -9.0)),
    ]
    assert [(score.token_id, score.top) for score in second] == [(3, ())]
    _, second = round_scores(result(), [0, 3])
    assert [score.top for score in second] == [((12, -12.0), (13, -13.0), (14, -14.0))]


def test_alternatives_need_ids_of_the_round() -> None:
    bare = replace(result(), topk_ids=None, topk_log_probs=None, tail_mass=None)
    assert [len(scores) for scores in round_scores(bare, [0, 0])] == [3, 1]


def test_records_get_copies_of_their_own_rows() -> None:
    found = result()
    first, second = round_likeliest(found)
    assert first[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert second[1].tolist() == [[-12.0, -13.0, -14.0, -15.0]]
    assert second[2].tolist() == [torch.tensor(0.3).item()]
    assert first[0].base is None
