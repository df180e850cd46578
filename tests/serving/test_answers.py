"""What may be told of an answer when: text that is final, scores that no stop string takes back."""

from draftkit.serving.answers import Answer
from draftkit.serving.jobs import Piece
from tests.serving.running import job


def pairs(ids: list[int]) -> str:
    return "".join(f"{token:02d}" for token in ids)


def answer(*stops: str) -> Answer:
    return Answer(job([1], stops=stops), lambda _: None, decode=pairs, seed=0)


def take(made: Answer, ids: list[int], *, done: bool = False, version: str = "v1") -> Piece | None:
    made.completion.output_ids += ids
    return made.take([-1.0] * len(ids), version=version, done=done)


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


def test_each_score_has_as_many_alternatives_as_the_job_wants() -> None:
    made = Answer(job([1], top_logprobs=2), lambda _: None, decode=pairs, seed=0)
    made.completion.topk_ids += [[12, 5, 6], [34, 7, 8]]
    made.completion.topk_log_probs += [[-1.0, -2.0, -3.0], [-1.0, -4.0, -5.0]]
    tops = []
    for token in (12, 34):
        piece = take(made, [token])
        assert piece is not None
        tops += [score.top for score in piece.scores]
    assert tops == [((12, -1.0), (5, -2.0)), ((34, -1.0), (7, -4.0))]
