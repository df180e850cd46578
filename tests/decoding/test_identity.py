"""Greedy speculative text is the text that `generate` of transformers gives, token by token.

In single precision two passes of other shapes differ in the last digits, so texts may part where
the target's two best tokens lie within MARGIN of each other; such ties are counted, and nothing
else is excused. Targets are random, and trained on a small language, so that drafts are right at
some places and wrong at others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder, tokens_needed
from draftkit.decoding.generation import DRAFT_ID, Completion, decode, finish, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.adapter import CausalAdapter
from tests import tiny

MARGIN = 1e-5
NEW = 24
GAMMA = 4
GREEDY = SamplingConfig(temperature=0.0)
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma"]
COMPILED = "mistral"  # the one of a run: its windows are shorter than the texts
Tell = Callable[[str, object], None]


# Pairs of models


@dataclass(frozen=True)
class Pair:
    """A target, a draft that is right in part, and texts that they are fed."""

    target: CausalAdapter
    draft: CausalAdapter
    prompts: list[list[int]]


def lengths(count: int) -> list[int]:
    """Of prompts: 1 to 40 tokens, those next to each other ragged."""
    return [1 + 17 * n % 40 for n in range(count)]


def random_pair(architecture: str, count: int) -> Pair:
    target, draft = tiny.pair(architecture)
    return Pair(target, draft, tiny.prompts(lengths(count)))


WORDS = 32


def language(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts [rows, length] in which two tokens say what follows, three times out of four."""
    law = torch.randint(WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(7))
    texts = torch.randint(WORDS, (rows, length), generator=generator)
    lawful = torch.rand(rows, length, generator=generator) < 0.75
    for i in range(2, length):
        follows = law[texts[:, i - 1], texts[:, i - 2] % 4]
        texts[:, i] = torch.where(lawful[:, i], follows, texts[:, i])
    return texts


def trained(architecture: str, *, steps: int, seed: int, **shape: Any) -> CausalAdapter:
    """A model that has seen some text of the language."""
    model: Any = tiny.model(architecture, vocab_size=WORDS, seed=seed, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        texts = language(16, 32, generator)
        optimizer.zero_grad()
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
    return CausalAdapter(model.requires_grad_(False), vocab_size=WORDS)


def trained_pair(architecture: str, count: int) -> Pair:
    texts = language(count, 40, torch.Generator().manual_seed(99)).tolist()
    one_layer = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": 1}
    return Pair(
        target=trained(architecture, steps=150, seed=1),
        draft=trained(architecture, steps=50, seed=2, **one_layer),
        prompts=[text[:n] for text, n in zip(texts, lengths(count), strict=True)],
    )


# Comparing


def generated(target: CausalAdapter, prompt: Sequence[int]) -> list[int]:
    """The greedy answer of transformers."""
    tokens = torch.tensor([list(prompt)])
    model: Any = target.model
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, tokens.shape[1] :].tolist()


def ties(pair: Pair, found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """How many texts part at a tie of the target. Fails where they part elsewhere."""
    count = 0
    for prompt, ours, theirs in zip(pair.prompts, found, expected, strict=True):
        assert len(ours) == len(theirs)
        parted = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if parted:
            text = torch.tensor([[*prompt, *theirs[: parted[0]]]])
            with torch.no_grad():
                logits = pair.target.model(input_ids=text).logits[0, -1, : pair.target.vocab_size]
            best = logits.topk(2)
            assert {ours[parted[0]], theirs[parted[0]]} == set(best.indices.tolist())
            assert float(best.values[0] - best.values[1]) < MARGIN
            count += 1
    return count


def texts_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def speculative(pair: Pair, prompts: Sequence[Sequence[int]], batch_size: int) -> list[Completion]:
    requests = list(make_requests(prompts, max_new_tokens=NEW, sampling=GREEDY, gamma=GAMMA))
    proposer = DraftModelProposer(pair.draft)
    return decode(pair.target, requests, eos_token_ids=(), batch_size=batch_size, proposer=proposer)


def check_pair(pair: Pair, *, alone: int, tell: Tell) -> None:
    """One batch of all prompts, small batches, and the first `alone` of them one by one."""
    expected = [generated(pair.target, prompt) for prompt in pair.prompts]
    together = speculative(pair, pair.prompts, batch_size=len(pair.prompts))
    tested, accepted = (sum(getattr(a, name) for a in together) for name in ("tested", "accepted"))
    assert 0.02 * tested < accepted < 0.98 * tested
    in_turn = texts_of(speculative(pair, pair.prompts, batch_size=3))
    count = ties(pair, texts_of(together), expected) + ties(pair, in_turn, expected)
    ours = [speculative(pair, [p], batch_size=1)[0].output_ids for p in pair.prompts[:alone]]
    first = Pair(pair.target, pair.draft, pair.prompts[:alone])
    count += ties(first, ours, expected[:alone])
    count += ties(first, ours, texts_of(together)[:alone])
    tell("prompts", len(pair.prompts))
    tell("acceptance", accepted / tested)
    tell("ties", count)
    assert count <= len(pair.prompts) / 20


# The tests


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_trained_targets_greedy_text_is_its_own(architecture: str, record_property: Tell) -> None:
    """Random targets of every architecture are in `test_generation.py`."""
    check_pair(trained_pair(architecture, 12), alone=4, tell=record_property)


@pytest.mark.soak
@pytest.mark.parametrize("make", [random_pair, trained_pair], ids=["random", "trained"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_targets_on_many_prompts(
    architecture: str, make: Callable[[str, int], Pair], record_property: Tell
) -> None:
    """30 prompts a pair, 420 in all."""
    check_pair(make(architecture, 30), alone=30, tell=record_property)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
@pytest.mark.parametrize("slots", [1, 4])
def test_compiled_greedy_text_is_the_targets(slots: int, record_property: Tell) -> None:
    pair = trained_pair(COMPILED, 30)
    requests = list(make_requests(pair.prompts, max_new_tokens=NEW, sampling=GREEDY, gamma=GAMMA))
    decoder = Decoder(
        pair.target, slots=slots, capacity=max(map(tokens_needed, requests)), compiled=True
    )
    decoder.attach(DRAFT_ID, DraftModelProposer(pair.draft))
    expected = [generated(pair.target, prompt) for prompt in pair.prompts]
    count = ties(pair, texts_of(finish(decoder, requests)), expected)
    record_property("ties", count)
    assert count <= 1


def test_a_wrong_token_is_no_tie() -> None:
    pair = random_pair("llama", 3)
    expected = [generated(pair.target, prompt) for prompt in pair.prompts]
    assert ties(pair, expected, expected) == 0
    with torch.no_grad():
        logits = pair.target.model(input_ids=torch.tensor([pair.prompts[1] + expected[1][:5]]))
    second = logits.logits[0, -1].topk(2).indices[1].item()
    wrong = [list(text) for text in expected]
    wrong[1][5] = second
    with pytest.raises(AssertionError):
        ties(pair, wrong, expected)
