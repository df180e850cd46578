"""Rounds on a CUDA device are those of the CPU, eager, captured and compiled, late and at once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import graphs
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.generation import finish
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.models.adapter import CausalAdapter
from draftkit.theory import noise
from tests import tiny
from tests.cuda.card import Code, codes, moved, on_devices
from tests.decoding.driving import DRAFT, SMALL, Answer, assert_same, drive, fresh_graphs, request
from tests.tabular import random_adapter, relative

CPU = torch.device("cpu")
GREEDY = SamplingConfig(temperature=0.0)
EVERYTHING = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)


@on_devices
@pytest.mark.parametrize("rows", [1, 17])
def test_noise_is_the_same_bits_everywhere(device: torch.device, rows: int) -> None:
    """If this fails, nothing that is sampled on the card is worth timing.

    What is made of indices stays inside int32, which is what Inductor computes them in; Triton
    refuses constants beyond it (pytorch#186057), torch 2.11 would wrap (pytorch#175966).
    """
    generator = torch.Generator().manual_seed(rows)
    key = {
        name: torch.randint(-(2**62), 2**62, (rows,), generator=generator)
        for name in ("seed", "row", "length")
    }
    there = {name: value.to(device) for name, value in key.items()}
    backend = "inductor" if device.type == "cuda" else "eager"
    for purpose in range(4):
        options: dict[str, Any] = {"count": 5, "purpose": purpose, "first": 2}
        expected = noise.uniform(**key, **options)
        compiled = torch.compile(noise.uniform, backend=backend, fullgraph=True, dynamic=False)
        for function in (noise.uniform, compiled):
            assert torch.equal(function(**there, **options).cpu(), expected)
        torch.compiler.reset()


def requests(*, vocab_size: int, longest: int, sampling: SamplingConfig) -> list[Request]:
    """Rows that come and go, some without a draft; one is long."""
    lengths = (3, 2, 5, 4, 6, 9, 1, longest)
    return [
        request(
            [(3 * n + row) % vocab_size for n in range(length)],
            gamma=(2, 0, 2)[row % 3],
            new=4 + 3 * row % 10,
            row=row,
            sampling=sampling,
        )
        for row, length in enumerate(lengths)
    ]


def played(
    code: Code, target: Any, draft: Any, *, sampling: SamplingConfig, rule: str = "speculative"
) -> list[Answer]:
    end = target.vocab_size - 1
    decoder = code.decoder(target, slots=4, capacity=512, eos_token_ids=[end], verification=rule)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    return drive(decoder, requests(vocab_size=end, longest=400, sampling=sampling))


@pytest.fixture
def one_size() -> Iterator[None]:
    """Code for all four slots, made in this test alone."""
    with fresh_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (4,))
        yield


@on_devices
@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_tables_say_what_they_say_on_the_cpu(
    device: torch.device, rule: str, one_size: None
) -> None:
    """In double precision, so that nothing is a near-tie; two buckets and two gammas in turns."""
    target = random_adapter(8, 1)
    draft = relative(target, 2)
    expected = played(Code(), target, draft, sampling=EVERYTHING, rule=rule)
    for code in codes(device, compiled=rule == "speculative"):
        there = moved(target, device), moved(draft, device)
        found = played(code, *there, sampling=EVERYTHING, rule=rule)
        assert_same(found, expected, atol=1e-9)


@on_devices
@pytest.mark.parametrize("sampling", [EVERYTHING, GREEDY], ids=["sampled", "greedy"])
def test_transformers_say_what_they_say_eagerly(
    device: torch.device, sampling: SamplingConfig, one_size: None
) -> None:
    pair = tiny.pair(**SMALL, max_position_embeddings=512)
    target, draft = (one.to(device) for one in pair)
    eager, *others = codes(device, compiled=sampling == EVERYTHING)
    expected = played(eager, target, draft, sampling=sampling)
    for code in others:
        assert_same(played(code, target, draft, sampling=sampling), expected, atol=1e-4)


@on_devices
def test_greedy_answers_are_those_of_generate(device: torch.device) -> None:
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    prompts = tiny.prompts([5, 17, 1, 9])
    wanted = [
        request(prompt, gamma=4, new=24, row=row, sampling=GREEDY)
        for row, prompt in enumerate(prompts)
    ]
    for code in (Code(), Code(captured=True, late=True)):
        decoder = code.decoder(target, slots=4, capacity=64)
        decoder.attach(DRAFT, DraftModelProposer(draft))
        for prompt, answer in zip(prompts, finish(decoder, wanted), strict=True):
            expected = target.model.generate(
                input_ids=torch.tensor([prompt], device=device), max_new_tokens=24, do_sample=False
            )
            assert answer.output_ids == expected[0, len(prompt) :].tolist()


@on_devices
def test_sampled_texts_have_the_targets_law(device: torch.device) -> None:
    """First token and first pair, within five standard errors of the target's law."""
    rows, slots = (3000, 250) if device.type == "cuda" else (400, 100)
    target = random_adapter(5, 1)
    law = target.logits(torch.tensor([[0, 1]]))[0, -1].softmax(-1)
    code = Code(captured=True, late=True)
    decoder = code.decoder(moved(target, device), slots=slots, capacity=16)
    decoder.attach(DRAFT, DraftModelProposer(moved(relative(target, 2), device)))
    wanted = [request([0, 1], gamma=2, new=2, row=row) for row in range(rows)]
    texts = [tuple(answer.output_ids) for answer in finish(decoder, wanted)]
    for token in range(5):
        then = target.logits(torch.tensor([[0, 1, token]]))[0, -1].softmax(-1)
        for other in range(5):
            expected = float(law[token] * then[other])
            share = texts.count((token, other)) / rows
            assert abs(share - expected) < 5 * (expected * (1 - expected) / rows) ** 0.5 + 1e-9


@on_devices
@pytest.mark.parametrize("kind", ["lookup", "hybrid", "staged"])
def test_proposers_of_every_kind_are_captured(device: torch.device, kind: str) -> None:
    target = random_adapter(8, 1)
    draft = relative(target, 2)

    def answers(code: Code, place: torch.device) -> list[Answer]:
        model = DraftModelProposer(moved(draft, place))
        proposers: dict[str, Any] = {
            "lookup": PromptLookup(),
            "hybrid": HybridProposer(PromptLookup(min_ngram=2), model),
            "staged": StagedProposer(PromptLookup(), model),
        }
        decoder = code.decoder(moved(target, place), slots=4, capacity=48)
        decoder.attach(DRAFT, proposers[kind])
        wanted = [request([1, 2, 1, 2, row % 3], gamma=3, new=9, row=row) for row in range(6)]
        return drive(decoder, wanted)

    expected = answers(Code(), CPU)
    for code in codes(device):
        found = answers(code, device)
        assert [answer.text for answer in found] == [answer.text for answer in expected]


@on_devices
def test_weights_that_are_swapped_between_rounds_are_those_of_the_next(
    device: torch.device,
) -> None:
    """Captures read them where they are, so the same kernels meet the new ones."""
    target, draft = (one.to(device) for one in tiny.pair(**SMALL))
    model = tiny.related(target.model.cpu(), noise=0.5, seed=9)
    target.model.to(device)
    new = CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE).to(device).weights()
    old = {name: weight.clone() for name, weight in draft.weights().items()}
    for code in codes(device):
        found = []
        for swaps in (True, False):
            draft.load_weights(old if swaps else new)
            decoder = code.decoder(target, slots=2, capacity=64)
            decoder.attach(DRAFT, DraftModelProposer(draft, version="old"))
            if swaps:
                drive(decoder, [request([1, 2], new=8, row=7)])
                decoder.swap(DRAFT, new, "new")
            found.append(drive(decoder, [request([1, 2, row], new=8, row=row) for row in range(2)]))
        assert [answer.text for answer in found[0]] == [answer.text for answer in found[1]]
        assert {fact[2] for answer in found[0] for fact in answer.facts} == {"new"}
        for one, other in zip(found[0], found[1], strict=True):
            assert [fact[1] for fact in one.facts] == [fact[1] for fact in other.facts]


@on_devices
def test_rows_that_leave_early_are_no_harm_to_those_that_stay(device: torch.device) -> None:
    target = random_adapter(8, 1)
    draft = relative(target, 2)
    wanted = [request([1, row % 5], new=20, gamma=2, row=row) for row in range(8)]
    stays = {1: 1, 4: 3, 5: 2}
    whole = None
    for code in codes(device):
        decoder = code.decoder(moved(target, device), slots=3, capacity=48)
        decoder.attach(DRAFT, DraftModelProposer(moved(draft, device)))
        texts = [answer.text for answer in drive(decoder, wanted, stays=stays)]
        kept = [text for number, text in enumerate(texts) if number not in stays]
        whole = kept if whole is None else whole
        assert kept == whole


@on_devices
def test_encoder_decoder_models_decode(device: torch.device) -> None:
    target, draft = (one.to(device) for one in tiny.seq2seq_pair("t5"))
    wanted = [
        request([*text, tiny.START], gamma=3, new=10, row=row, sampling=GREEDY)
        for row, text in enumerate(tiny.prompts([5, 9, 3]))
    ]
    found = []
    for code in codes(device):
        decoder = code.decoder(target, slots=3, capacity=48)
        decoder.attach(DRAFT, DraftModelProposer(draft))
        found.append([answer.text for answer in drive(decoder, wanted)])
    assert found == [found[0]] * len(found)
