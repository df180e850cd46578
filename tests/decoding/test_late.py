"""Who waits for whom: the host for the round before, the device for nobody."""

import math
from collections.abc import Sequence

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import Completion, finish, record
from draftkit.decoding.state import Request
from tests.decoding.driving import SAMPLINGS, decoder_of, request
from tests.decoding.pretended import pretended_device, put_on_device


def requests(count: int, *, new: Sequence[int] = (12, 5, 9)) -> list[Request]:
    return [
        request([1 + row % 5, 2], new=new[row % 3], sampling=SAMPLINGS[row % 4], row=row)
        for row in range(count)
    ]


def answers(decoder: Decoder, wanted: Sequence[Request]) -> list[list[int]]:
    """Decode them, as many at once as there are slots, and read all that rounds report."""
    read = finish(decoder, wanted)
    for answer in read:
        assert all(map(math.isfinite, answer.tail_mass))
        assert len(answer.topk_ids) == len(answer.topk_log_probs) == len(answer.output_ids)
    return [answer.output_ids for answer in read]


def test_the_host_waits_for_the_round_before_while_the_next_is_under_way() -> None:
    """From the first prompt to the last answer no value is read but what has been copied."""
    wanted = requests(7)
    expected = answers(decoder_of(slots=3, late=False, top_k=2, eos_token_ids=[7]), wanted)
    decoder = put_on_device(decoder_of(slots=3, late=True, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        assert answers(decoder, wanted) == expected
    assert len(device.waits) > 10
    # As many results as are behind when one is read: those of the next round, of one group.
    behind = [made - number - 1 for number, made in device.waits]
    assert set(behind) == {1}


def test_rounds_of_the_same_rows_are_read_without_a_look_at_the_device() -> None:
    decoder = put_on_device(decoder_of(slots=3, late=True))
    with pretended_device(lists_wait=False) as device:
        slots = decoder.join(requests(3, new=(60, 60, 60)))
        running = {slot: Completion([]) for slot in slots}
        for _ in range(5):
            for result in decoder.round():
                record(running, result)
    assert [number for number, _ in device.waits] == [0, 1, 2, 3]
    assert all(completion.rounds == 4 for completion in running.values())


def test_read_at_once_a_round_is_waited_for_and_no_other() -> None:
    wanted = requests(4)
    decoder = put_on_device(decoder_of(slots=3, late=False, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        answers(decoder, wanted)
    assert all(made == number + 1 for number, made in device.waits)


def test_the_event_is_of_the_stream_of_the_rounds_own_device() -> None:
    decoder = put_on_device(decoder_of(slots=1, late=True, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        answers(decoder, requests(1))
    assert {stream.device for stream in device.streams} == {decoder.target.device}
