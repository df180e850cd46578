"""What the engine serves has the target's law, before, while and after drafters are swapped.

Thousands of unseeded jobs on a pair of tables, judged by chi-square over positions and pairs of
positions. The mutants are what a hot swap could break: proposals of the old weights verified
against the q of the new ones, and noise that repeats.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.proposers import DraftModelProposer, Proposal
from draftkit.online.registry import Registry
from draftkit.serving import engine as engine_module
from draftkit.serving.engine import Engine
from tests.decoding.checks import served
from tests.serving.running import ask, job, letters, publish, serving, until
from tests.tabular import TabularAdapter
from tests.theory.checks import adversarial_tables
from tests.theory.laws import START, LawBroken, check_sample, pair_laws, sequences

TOKENS = 6
ANSWERS = 1536  # that the law is judged by, and that find both mutants; the soak has more
SAMPLING = SamplingConfig(temperature=0.8, top_k=6, top_p=0.9)


def tables() -> tuple[TabularAdapter, TabularAdapter]:
    target, draft = (
        TabularAdapter(torch.cat([t, t[:1]]).double().log()) for t in adversarial_tables()
    )
    return target, draft


def other_weights(draft: TabularAdapter, seed: int) -> dict[str, torch.Tensor]:
    """A drafter that errs elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(draft.vocab_size, generator=generator)
    table = draft.table[..., order].clamp(min=-60.0)  # weights are finite
    return {"table": table, "memory": draft.memory.clone()}


def sample(engine: Engine, count: int) -> torch.Tensor:
    """The tokens of `count` jobs [count, TOKENS], through the queue as it has room."""
    texts: list[list[int]] = []
    while len(texts) < count:
        clients = ask(
            engine, *[job(START, TOKENS, sampling=SAMPLING) for _ in range(min(256, count))]
        )
        texts += [client.wait().ids for client in clients]
    return torch.tensor(texts[:count])


def check(tokens: torch.Tensor, target: TabularAdapter) -> None:
    size = target.vocab_size
    law = served(target, sequences(size, 2), SAMPLING).view(size, size, size)
    check_sample(tokens, pair_laws(law, TOKENS))


def holds(draw: Callable[[int], torch.Tensor], target: TabularAdapter, count: int) -> None:
    """The law of what `draw` returns. Of a thousand true samples one fails, since nothing is
    seeded: that one is drawn anew, twice as large. A broken law fails both."""
    try:
        check(draw(count), target)
    except LawBroken:
        check(draw(2 * count), target)


@contextmanager
def swapping(registry: Registry, draft: TabularAdapter) -> Iterator[None]:
    """Versions that come one after the other, as fast as they are installed."""
    ended = threading.Event()

    def swap() -> None:
        number = 0
        while not ended.wait(0.02):
            number += 1
            publish(registry, other_weights(draft, number))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def engine_on(target: TabularAdapter, draft: TabularAdapter, **others: Any) -> Iterator[Engine]:
    def make() -> TabularAdapter:
        return TabularAdapter(draft.table, draft.memory)

    settings: dict[str, Any] = {"slots": 64, "queue": 256, "max_length": 16, "detokenize": letters}
    with serving(target, make, **settings | others) as engine:
        yield engine


def serve_and_swap(folder: Path, count: int) -> int:
    """Law before, during and after swaps; returns how many there were."""
    target, draft = tables()
    registry = Registry(folder)
    with engine_on(target, draft, registries={"default": registry}) as engine:
        holds(partial(sample, engine), target, count)
        with swapping(registry, draft):
            holds(partial(sample, engine), target, count)
        until(lambda: engine.drafters.versions()["default"] == registry.names()[-1])
        holds(partial(sample, engine), target, count)
        return engine.counters().swaps


def test_served_text_has_the_targets_law_before_during_and_after_swaps(tmp_path: Path) -> None:
    assert serve_and_swap(tmp_path, ANSWERS) >= 5


@pytest.mark.soak
def test_served_text_has_the_targets_law_in_fifty_thousand_answers(tmp_path: Path) -> None:
    assert serve_and_swap(tmp_path, 50_000) >= 50


@pytest.mark.parametrize("verification", ["block", "match"])
def test_other_rules_of_verification_serve_the_law_too(verification: str) -> None:
    target, draft = tables()
    with engine_on(target, draft, verification=verification, adapts=True) as engine:
        holds(partial(sample, engine), target, ANSWERS)


class Torn(DraftModelProposer):
    """Proposes with one set of weights and tells the q of another: a swap that tears a round."""

    def propose(self, view: Any, gamma: int) -> Proposal:
        proposal = super().propose(view, gamma)
        assert proposal.draft_probs is not None
        order = torch.randperm(self.draft.vocab_size, generator=torch.Generator().manual_seed(1))
        return proposal._replace(draft_probs=proposal.draft_probs[..., order])


def test_a_round_torn_by_a_swap_is_found_out() -> None:
    target, draft = tables()
    with engine_on(target, draft, started=False) as engine:
        engine.drafters.routes["default"].proposer.__class__ = Torn
        engine.start()
        tokens = sample(engine, ANSWERS)
    with pytest.raises(LawBroken):
        check(tokens, target)


def test_noise_that_repeats_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module.secrets, "randbelow", lambda _: 7)
    target, draft = tables()
    with engine_on(target, draft) as engine:
        tokens = sample(engine, 500)
    with pytest.raises(LawBroken):
        check(tokens, target)
