"""What may be told of an answer when: text that is final, scores that no stop string takes back."""

from dataclasses import replace

import torch

from draftkit.decoding.results import RoundResult
from draftkit.serving.answers import Answer, round_likeliest, round_scores
from draftkit.serving.jobs import Piece, TokenScore
from tests.serving.running import job


def pairs(ids: list[int]) -> str:
    return "".join(f"{token:02d}" for token in ids)


def answer(*stops: str) -> Answer:
    return Answer(job([1], stops=stops), lambda _: None, decode=pairs, seed=0, now=0.0)


def take(made: Answer, ids: list[int], *, done: bool = False, version: str = "v1") -> Piece | None:
    made.completion.output_ids += ids
    return made.take([TokenScore(n, -1.0) for n in ids], version=version, done=done)


def ids(piece: Piece | None) -> list[int]:
    assert piece is not None
    return [score.token_id for score in piece.scores]


def test_without_stop_strings_everything_is_told_at_once() -> None:
    made = answer()
    piece = take(made, [12, 34])
    assert piece is not None
    assert (piece.text, ids(piece), piece.finish_reason) == ("1234", [12, 34], None)
    assert piece.speculation is None
    last = take(made, [56], done=True)
    assert last is not None
    assert (last.text, ids(last), last.finish_reason) == ("56", [56], "length")
    assert last.speculation is not None


def test_scores_wait_while_text_may_be_the_beginning_of_a_stop_string() -> None:
    made = answer("4567")
    assert ids(take(made, [12])) == [12]
    piece = take(made, [34])  # "4" may begin it
    assert piece is not None
    assert (piece.text, ids(piece)) == ("3", [])
    assert take(made, [56]) is None
    piece = take(made, [88])  # it was none
    assert piece is not None
    assert (piece.text, ids(piece)) == ("45688", [34, 56, 88])


def test_a_stop_string_takes_back_what_was_held() -> None:
    made = answer("4567")
    take(made, [12])
    take(made, [34])
    piece = take(made, [56, 78, 99])
    assert piece is not None
    assert (piece.text, ids(piece), piece.finish_reason) == ("", [34], "stop")
    assert made.completion.output_ids == [12, 34]


def test_an_end_of_text_is_a_stop_and_an_early_end_tells_what_was_held() -> None:
    made = answer("4567")
    take(made, [34])
    made.completion.ended = True
    piece = take(made, [50], done=True)
    assert piece is not None
    assert (piece.text, ids(piece), piece.finish_reason) == ("450", [34, 50], "stop")
    made = answer("4567")
    take(made, [34])
    piece = made.end("timeout")
    assert (piece.text, ids(piece), piece.finish_reason) == ("4", [34], "timeout")


def test_the_version_is_that_of_the_last_round() -> None:
    made = answer()
    assert made.version == ""
    for version in ("v1", "v1", "v2"):
        take(made, [1], version=version)
    speculation = made.end("cancelled").speculation
    assert speculation is not None
    assert speculation.version == made.version == "v2"


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
