"""Nobody waits, nothing piles up, and what others do on the card breaks no capture."""

import threading
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, finish, record
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.serving.drafters import fitted, same
from tests import tiny
from tests.cuda.card import Code, no_waiting, on_devices, used_bytes
from tests.decoding.driving import DRAFT, SMALL, request

MIB = 1 << 20
SAMPLINGS = {
    "sampled": SamplingConfig(),
    "cut": SamplingConfig(temperature=0.7, top_k=20, top_p=0.9),
    "greedy": SamplingConfig(temperature=0.0),
    "penalty": SamplingConfig(repetition_penalty=1.2),
}


@on_devices
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_round_waits_for_the_device(device: torch.device, sampling: str, captured: bool) -> None:
    """Rounds of full groups with all that is read of them, top ids included."""
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    decoder = Code(captured=captured, late=True).decoder(target, slots=3, capacity=128, top_k=4)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    wanted = [
        request([1, 2, row], new=100, row=row, sampling=SAMPLINGS[sampling]) for row in range(3)
    ]
    running = {slot: Completion([]) for slot in decoder.join(wanted)}
    for _ in range(3):
        for result in decoder.round():
            record(running, result)
    with no_waiting(device):
        for _ in range(5):
            for result in decoder.round():
                record(running, result)
                assert result.topk_ids is not None
                assert not result.topk_ids.is_cuda
                result.topk_ids.tolist()
    assert all(completion.rounds == 7 for completion in running.values())


@on_devices
def test_rows_join_and_leave_without_waiting(device: torch.device) -> None:
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    decoder = Code(late=True).decoder(target, slots=3, capacity=96)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    wanted = [request([1, 2, row], new=4 + row, row=row) for row in range(9)]
    finish(decoder, wanted[:3])  # whatever is looked at once, the head above all
    with no_waiting(device):
        answers = finish(decoder, wanted)
    assert [len(answer.output_ids) for answer in answers] == [4 + row for row in range(9)]


@on_devices
def test_captures_stand_copies_of_another_thread(device: torch.device) -> None:
    """A server reads new weights beside its rounds, whose keys are captured meanwhile."""
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    weights = {name: weight.cpu() + 0 for name, weight in draft.weights().items()}
    stop, copies, errors = threading.Event(), [0], list[BaseException]()

    def copy() -> None:
        try:
            while not stop.is_set():
                assert same(fitted(draft.weights(), weights), fitted(draft.weights(), weights))
                copies[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for _ in range(4):
            decoder = Code(captured=True, late=True).decoder(target, slots=4, capacity=64)
            decoder.attach(DRAFT, DraftModelProposer(draft))
            for gamma in (1, 2, 3):
                finish(decoder, [request([1, 2], gamma=gamma, new=9, row=row) for row in range(4)])
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert copies[0] > 0


@on_devices
def test_decoders_leave_no_memory_behind(device: torch.device) -> None:
    """Each takes its captures and their caches along.

    Garbage is not collected during a capture: freeing a graph then invalidates it
    (pytorch#161037, pytorch#195397).
    """
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))

    def generation() -> None:
        decoder = Code(captured=True, late=True).decoder(target, slots=8, capacity=512)
        decoder.attach(DRAFT, DraftModelProposer(draft))
        finish(decoder, [request([1, 2], new=12, row=row) for row in range(8)])

    for _ in range(2):
        generation()
    before = used_bytes(device)
    for _ in range(20 if device.type == "cuda" else 2):
        generation()
    assert used_bytes(device) - before < MIB


@on_devices
@pytest.mark.parametrize("captured", [False, True])
def test_memory_does_not_grow_with_rounds(device: torch.device, captured: bool) -> None:
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    decoder = Code(captured=captured, late=True).decoder(target, slots=4, capacity=128)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    rounds = [0]
    real: Any = decoder.round

    def counted() -> Any:
        rounds[0] += 1
        return real()

    decoder.round = counted
    before, most = None, 1000 if device.type == "cuda" else 40
    while rounds[0] < most:
        finish(decoder, [request([1, 2], new=60, row=row) for row in range(4)])
        before = used_bytes(device) if before is None else before
    assert used_bytes(device) - before < MIB
