"""What may be told of an answer when: text that is final, scores that no stop string takes back."""

import pytest

from draftkit.serving.answers import Answer, Piece
from tests.serving.running import job


def pairs(ids: list[int]) -> str:
    return "".join(f"{token:02d}" for token in ids)


def answer(*stops: str, ids: tuple[int, ...] = ()) -> Answer:
    request = job([1], stops=stops, stop_token_ids=ids)
    return Answer(request, lambda _: None, detokenize=pairs, seed=0)


def take(made: Answer, ids: list[int], *, done: bool = False) -> Piece | None:
    made.completion.output_ids += ids
    return made.take([-1.0] * len(ids), version="v1", done=done)


def ids(piece: Piece | None) -> list[int]:
    assert piece is not None
    return [score.token_id for score in piece.scores]


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


@pytest.mark.parametrize(
    ("stops", "rounds", "text", "left"),
    [
        ((), [[12, 34, 77, 56, 77]], "1234", [12, 34, 77]),  # the first; its text is left out
        ((), [[12], [77]], "12", [12, 77]),
        ((), [[77]], "", [77]),
        (("23",), [[12, 34, 77]], "1", [12]),  # a stop string was complete before
        (("77",), [[12, 77]], "12", [12, 77]),  # and is none where the token has no text
        (("5677",), [[12, 56], [77, 34]], "1256", [12, 56, 77]),  # what was held back is said
    ],
)
def test_a_stop_token_ends_an_answer_and_its_text_is_left_out(
    stops: tuple[str, ...], rounds: list[list[int]], text: str, left: list[int]
) -> None:
    made = answer(*stops, ids=(77, 78))
    pieces = [piece for new in rounds if (piece := take(made, new)) is not None]
    assert pieces[-1].finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in ids(piece)] == made.completion.output_ids == left


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


@pytest.mark.parametrize(("continues", "text"), [(True, " 3 4"), (False, "3 4")])
def test_a_completion_goes_on_from_its_prompt_and_a_chat_is_a_text_of_its_own(
    continues: bool, text: str
) -> None:
    """Decoders as Llama 2's drop the first space of a text: a completion keeps its own."""

    def words(ids: list[int]) -> str:
        return "".join(f" {token}" for token in ids).removeprefix(" ")

    made = Answer(job([1, 2], continues=continues), print, detokenize=words, seed=0)
    pieces = [take(made, [3]), take(made, [4], done=True)]
    assert "".join(piece.text for piece in pieces if piece) == text
