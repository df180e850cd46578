"""Decoders driven to the end of their requests, and a compiler that checks instead of compiling.

`drive` returns what was read of every request, so that two ways of decoding can be compared.
`Strict` stands in for the compiler: it runs graphs as they were traced, with every number of the
host that entered them, and holds each later call to all that machine code takes for granted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import graphs
from draftkit.decoding import round as units
from draftkit.decoding.decoder import Decoder, RoundResult
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.proposers import (
    DraftModelProposer,
    Proposal,
)
from draftkit.decoding.round import RoundInputs
from draftkit.decoding.state import DecodeState, Request, RoundView, make_group
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.cache import visible_slots
from draftkit.models.heads import EAGLE3, MEDUSA, adapted, head_config, new_head
from draftkit.theory import noise
from tests import tiny
from tests.decoding.checks import served
from tests.tabular import TabularAdapter, random_adapter, relative

DRAFT = "draft"
SMALL: dict[str, Any] = {  # of a tiny model
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.6, top_k=4, top_p=0.9),
    SamplingConfig(temperature=0.0),
    SamplingConfig(repetition_penalty=1.5),
]


def decoder_of(
    *,
    slots: int = 3,
    capacity: int = 80,
    policy: AdaptiveGamma | None = None,
    **options: Any,
) -> Decoder:
    """A decoder of a pair of tables, with free slots."""
    target = random_adapter(8, 1)
    decoder = Decoder(target, slots=slots, capacity=capacity, **options)
    decoder.gamma_policy = policy
    decoder.attach(DRAFT, DraftModelProposer(relative(target, 2), version="v1"))
    return decoder


def request(prompt: Sequence[int], *, new: int = 10, gamma: int = 2, **others: Any) -> Request:
    settings: dict[str, Any] = {"sampling": SamplingConfig()}
    settings["proposer_id"] = DRAFT if gamma else None
    return Request(prompt_ids=prompt, max_new_tokens=new, gamma=gamma, **settings | others)


TEXTS = [[3, 1, 4, 3, 1], [5], [2, 6, 5, 3, 5, 0], [0, 7, 0, 7]]  # the first and the last repeat


def view_of(
    gamma: int,
    texts: Sequence[Sequence[int]] = TEXTS,
    samplings: Sequence[SamplingConfig] = SAMPLINGS,
) -> RoundView:
    """What a decoder would show of rows with those texts over 8 tokens, under seed 11."""
    state = DecodeState.empty(len(texts), 32, torch.device("cpu"))
    for slot, (text, sampling) in enumerate(zip(texts, cycle(samplings), strict=False)):
        state.admit(slot, request(text, gamma=gamma, sampling=sampling, seed=11, row=slot))
    group = make_group(state, list(range(len(texts))), gamma, DRAFT)
    visible = visible_slots(max(map(len, texts)) + gamma, 32)
    target: Any = SimpleNamespace(vocab_size=8)
    cache = SimpleNamespace(streams={})
    bench: Any = SimpleNamespace(state=state, target=target, noise=noise.uniform, cache=cache)
    return units.round_view(bench, RoundInputs(group, visible))


def ready(proposer: Any) -> Any:
    """`proposer` with all of each of `TEXTS` but its last token in its cache."""
    proposer.allocate(len(TEXTS), 32)
    for row, text in enumerate(TEXTS):
        if len(text) > 1:
            proposer.prefill(
                torch.tensor([text[:-1]]),
                positions=torch.arange(len(text) - 1)[None],
                rows=torch.tensor([row]),
                visible=len(text),
                features=None,
            )
    return proposer


def own_laws(
    model: TabularAdapter, proposal: Proposal, samplings: Sequence[SamplingConfig] = SAMPLINGS
) -> list[Tensor]:
    """The served laws [K, V] of `model` before each proposal of rows of `TEXTS`."""
    rows = zip(TEXTS, samplings, proposal.tokens.tolist(), strict=True)
    return [
        torch.cat([served(model, torch.tensor([text + tokens[:i]]), s) for i in range(len(tokens))])
        for text, s, tokens in rows
    ]


@dataclass
class Answer:
    """What was read of one request: a line of host facts and one of numbers a round."""

    text: list[int] = field(default_factory=list)
    facts: list[tuple[Any, ...]] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)

    def add(self, result: RoundResult, row: int) -> None:
        """One more round."""
        count, emitted = result.committed[row], result.emitted[row]
        drafted = result.lengths[row]
        self.text += result.tokens[row, :count].tolist()
        self.facts.append(
            (
                (result.gamma, drafted, emitted, count, result.ended[row], result.done[row]),
                result.draft_tokens[row, :drafted].tolist(),
                result.proposer_version,
            )
        )
        of_tokens = (result.target_log_probs, result.log_sum_exp, result.served_log_sum_exp)
        numbers = [result.acceptance[row, :drafted], *(part[row, :emitted] for part in of_tokens)]
        self.numbers.append(torch.cat([part.double() for part in numbers]))


def head(kind: str, *, draft_ids: int = tiny.VOCAB_SIZE) -> tuple[CausalAdapter, Adapter]:
    """A target of seven layers, and a head of random weights that is right now and then.

    It proposes the first `draft_ids` ids.
    """
    base = tiny.model("llama", **SMALL | {"num_hidden_layers": 7})
    target = CausalAdapter(base, vocab_size=tiny.VOCAB_SIZE)
    more = {"medusa_heads": 3} if kind == MEDUSA else {"draftkit_steps": 3}
    if kind == "p-eagle":
        more = {"pard_token": tiny.VOCAB_SIZE - 1, "pard_k": 3}
    name = EAGLE3 if kind == "p-eagle" else kind
    config = head_config(base.config, name, draft_ids=draft_ids, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = new_head(
            base, config, torch.arange(draft_ids) if draft_ids < tiny.VOCAB_SIZE else None
        )
        for weight in made.parameters():
            weight.data.add_(0.1 * torch.randn_like(weight))
    return target, adapted(made.eval(), target=target)


def drive(
    decoder: Decoder, requests: Sequence[Request], *, stays: Mapping[int, int] | None = None
) -> list[Answer]:
    """Decode `requests`, as many at once as there are slots; `stays` limits rounds by request.

    A request that leaves early does so after that many calls of `round`, whatever has been read.
    """
    stays = stays or {}
    answers = [Answer() for _ in requests]
    waiting = list(range(len(requests)))
    running: dict[int, int] = {}  # slot -> request
    calls: dict[int, int] = {}
    while waiting or running:
        joining = [waiting.pop(0) for _ in range(min(len(waiting), decoder.free_slots))]
        running |= dict(zip(decoder.join([requests[n] for n in joining]), joining, strict=True))
        results = decoder.round()
        done = set()
        for result in results:
            for row, slot in enumerate(result.slots):
                answers[running[slot]].add(result, row)
                if result.done[row]:
                    done.add(slot)
        for slot, number in running.items():
            calls[number] = calls.get(number, 0) + 1
            if calls[number] == stays.get(number):
                done.add(slot)
        decoder.leave(sorted(done))
        running = {slot: number for slot, number in running.items() if slot not in done}
    return answers


def assert_same(found: Sequence[Answer], expected: Sequence[Answer], *, atol: float) -> None:
    """The same tokens and counts; numbers equal to `atol`, large ones in proportion."""
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert [answer.facts for answer in found] == [answer.facts for answer in expected]
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one.numbers, other.numbers, strict=True):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)


class Taken(AssertionError):
    """Code was called with something that it was not made for."""


class Strict:
    """A backend of `torch.compile`: the traced graph, and a check of its inputs in every call."""

    def __init__(self) -> None:
        self.made = 0
        self.frozen: list[bool] = []  # of each graph, whether weights were to be packed into it

    def __call__(self, module: Any, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self.made += 1
        self.frozen.append(torch._inductor.config.freezing)
        expected = _taken_for_granted(examples)

        def run(*inputs: Any) -> Any:
            if (found := _taken_for_granted(inputs)) != expected:
                raise Taken(f"{found} where {expected} was taken for granted")
            return module.forward(*inputs)

        return run


def _taken_for_granted(inputs: Sequence[Any]) -> list[object]:
    """Layout of tensors and which of them share memory; the values of what is no tensor."""
    owners: dict[int, int] = {}
    found: list[object] = []
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            first = owners.setdefault(value.untyped_storage().data_ptr(), place)
            shared = first if value.numel() else None
            layout = (tuple(value.shape), value.stride(), value.dtype, value.device)
            found.append((layout, shared))
        else:
            found.append(value)
    return found


@contextmanager
def strict_compiler() -> Iterator[Strict]:
    """No graphs but those made inside, by `Strict`."""
    backend, compiler = Strict(), torch.compile

    def compile_strictly(function: Any, **options: Any) -> Any:
        return compiler(function, **options | {"backend": backend})

    with fresh_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_strictly)
        yield backend


@contextmanager
def fresh_graphs() -> Iterator[None]:
    """Neither graphs of others inside, nor these afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_shared", {})
        patch.setattr(graphs, "_by_owner", type(graphs._by_owner)())
        yield
    torch.compiler.reset()


class Schedule(AdaptiveGamma):
    """A policy that goes through a list, whatever happens."""

    def __init__(self, gammas: Sequence[int]) -> None:
        self.gammas = list(gammas)
        self.asked = 0
        self.told: list[tuple[int, list[int]]] = []

    def choose(self, *, batch: int, most: int) -> int:
        self.asked += 1
        return min(most, self.gammas[(self.asked - 1) % len(self.gammas)])

    def observe(self, *, gamma: int, accepted: Sequence[int]) -> None:
        self.told.append((gamma, list(accepted)))
