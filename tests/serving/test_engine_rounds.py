"""What a round brings reaches counts and listeners, each thing once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.online.registry import Registry
from draftkit.serving import engine as engine_module
from draftkit.serving.drafters import START
from draftkit.serving.engine import prompt_scores
from tests import tiny
from tests.serving.running import (
    GREEDY,
    TARGET,
    Client,
    ask,
    job,
    publish,
    serving,
    stepped,
)

PROMPT = tiny.prompts([6])[0]


def test_an_answer_of_two_versions_is_counted_for_both(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    with serving(registries={"default": registry}, started=False) as engine:
        ask(engine, job(PROMPT, 40))
        engine._step()
        publish(registry, TARGET.weights())
        engine.drafters.poll()
        stepped(engine)
        keys = {version for _, version in engine.counters().drafters}
    assert keys == {START, "v000001"}


def test_counts_that_were_handed_out_stay_as_they_were() -> None:
    with serving(started=False) as engine:
        ask(engine, job(PROMPT, 9, sampling=GREEDY))
        stepped(engine)
        before = engine.counters()
        kept = copy.deepcopy(before)
        ask(engine, job(PROMPT, 5, sampling=GREEDY))
        stepped(engine)
        assert before == kept
        assert (before.generated_tokens, engine.counters().generated_tokens) == (9, 14)


def test_counts_of_tokens_never_fall_and_end_as_what_was_told() -> None:
    """A stop string of twelve tokens takes back those of several rounds of at most four."""

    def triples(ids: list[int]) -> str:
        return "".join(f"{token:03x}" for token in ids)

    def run(*stops: str) -> tuple[Client, list[int]]:
        with serving(detokenize=triples, started=False) as engine:
            (client,) = ask(engine, job(PROMPT, 30, seed=3, stops=stops))
            counts = [0]
            while not client.ended.is_set():
                engine._step()
                counts.append(engine.counters().generated_tokens)
        return client, counts

    whole, counts = run()
    assert counts[-1] == len(whole.ids) == 30
    client, counts = run(whole.text[15:51])
    assert client.text == whole.text[:15]
    assert counts == sorted(counts)
    assert counts[-1] == len(client.ids) == 5


def test_an_error_in_a_round_ends_each_answer_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(started=False) as engine:
        done, other = ask(engine, job(PROMPT, 1), job(PROMPT, 9))
        failing: Any = other.answer
        failing.take = lambda *_, **__: 1 / 0
        stepped(engine)
        assert (done.reason, other.reason) == ("length", "error")
        assert engine.decoder.free_slots == engine.slots
        assert engine.counters().errors == 1


def test_an_answer_that_cannot_join_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    with serving(started=False) as engine:
        good, bad = ask(engine, job(PROMPT, 5), job(PROMPT, 500))
        stepped(engine)
        assert (good.reason, bad.reason) == ("length", "error")


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_prompt_is_scored_whatever_part_of_it_is_scored_at_once(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(engine_module, "SCORED", size)
    with torch.no_grad():
        own = TARGET.model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    first, *others = prompt_scores(TARGET, PROMPT, 3)
    assert (first.token_id, first.log_prob, first.top) == (PROMPT[0], None, ())
    assert [score.token_id for score in others] == PROMPT[1:]
    best = own[:-1].topk(3)
    for at, score in enumerate(others):
        assert score.log_prob == pytest.approx(own[at, PROMPT[at + 1]].item(), abs=1e-5)
        ids, values = zip(*score.top, strict=True)
        assert ids == tuple(best.indices[at].tolist())
        assert values == pytest.approx(best.values[at].tolist(), abs=1e-5)
    (only,) = prompt_scores(TARGET, PROMPT[:1], 3)
    assert only == first
