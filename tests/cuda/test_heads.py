"""Heads on the target's hidden states, and trees, on a CUDA device: captured rounds, no waiting."""

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, record
from draftkit.decoding.proposers import DraftModelProposer, drafting
from draftkit.decoding.trees import chosen_tree
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.heads import EAGLE3, MEDUSA
from tests import tiny
from tests.cuda.card import Code, codes, no_waiting, on_devices
from tests.decoding.driving import DRAFT, SMALL, Answer, assert_same, drive, head, request

SAMPLED, GREEDY = SamplingConfig(temperature=0.8, top_k=20), SamplingConfig(temperature=0.0)
TREE = chosen_tree([[0.5, 0.2, 0.1], [0.4, 0.2], [0.4]], 9)
WAYS = [(kind, tree) for kind in (EAGLE3, "p-eagle", MEDUSA) for tree in (False, True)]
of_every_way = pytest.mark.parametrize(("kind", "tree"), [*WAYS, ("plain", True)])


def pair(kind: str, device: torch.device) -> tuple[CausalAdapter, Adapter]:
    """A target, and a drafter that proposes some of its ids; both on `device`."""
    made = tiny.pair(**SMALL) if kind == "plain" else head(kind, draft_ids=200)
    target, draft = (one.to(device) for one in made)
    return target, draft


def proposer(draft: Adapter, *, tree: bool) -> DraftModelProposer:
    return drafting(draft, tree=TREE.to(draft.device) if tree else None)


@on_devices
@of_every_way
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_captured_rounds_say_what_eager_ones_say(
    device: torch.device, kind: str, tree: bool, sampling: SamplingConfig
) -> None:
    """Of rows that come and go, one of a single token, which has no features yet."""
    target, draft = pair(kind, device)

    def answers(code: Code) -> list[Answer]:
        decoder = code.decoder(target, slots=3, capacity=96)
        decoder.attach(DRAFT, proposer(draft, tree=tree))
        wanted = [
            request(prompt, gamma=3, new=8 + row, row=row, sampling=sampling)
            for row, prompt in enumerate(tiny.prompts([1, 14, 6, 9, 3]))
        ]
        return drive(decoder, wanted)

    eager, *others = codes(device)
    expected = answers(eager)
    for code in others:
        assert_same(answers(code), expected, atol=1e-4)


@on_devices
@of_every_way
@pytest.mark.parametrize("captured", [False, True])
def test_no_round_waits_for_the_device(
    device: torch.device, kind: str, tree: bool, captured: bool
) -> None:
    target, draft = pair(kind, device)
    decoder = Code(captured=captured, late=True).decoder(target, slots=3, capacity=128)
    decoder.attach(DRAFT, proposer(draft, tree=tree))
    wanted = [request([1, 2, row], gamma=3, new=100, row=row) for row in range(3)]
    running = {slot: Completion([]) for slot in decoder.join(wanted)}
    for _ in range(3):
        for result in decoder.round():
            record(running, result)
    with no_waiting(device):
        for _ in range(5):
            for result in decoder.round():
                record(running, result)
    assert all(completion.rounds == 7 for completion in running.values())
