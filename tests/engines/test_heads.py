"""Heads in real engines: the answers stay, and each accepts what the formulas of the format say.

Run by `pytest -m engines` after `make engines`; an engine that is not installed is skipped.
"""

import operator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftkit.config import SamplingConfig
from draftkit.endpoint import Endpoint
from draftkit.engines.counters import Server
from draftkit.evaluation.intervals import Estimate, estimate
from draftkit.theory.acceptance import Rate
from tests.engines import study
from tests.engines.heads import (
    Head,
    features_of,
    fitted,
    parallel,
    proposals,
    rounds,
    shuffled,
    swapped,
)
from tests.engines.pairs import EMBEDDED, text_rows
from tests.engines.servers import DRAFTS, NOTHING, Launch, export_pair, serving
from tests.engines.test_real_engines import greedy, installed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS, LENGTH, TOKENS, GAMMA = 20, 16, 32, 3
IDS, MASK = 1024, 4095  # that a head proposes; of the masks
GREEDY = SamplingConfig(temperature=0.0)


class Made(NamedTuple):
    """heads by name. texts [PROMPTS, T]: greedy answers of the target with their prompts, longer by
    GAMMA than the engines' answers. features [PROMPTS, T, 3 H]. ends: of text."""

    heads: dict[str, Head]
    texts: Tensor
    features: Tensor
    end: int


@cache
def made() -> Made:
    """Heads of the embedded target."""
    target: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    rows = text_rows(100)
    prompts, others = rows[:PROMPTS, :LENGTH], rows[PROMPTS:]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts, own = (
        target.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=n, **options)
        for given, n in ((prompts, TOKENS + GAMMA), (others[:, :32], 64))
    )
    frequent = own.flatten().bincount(minlength=target.config.vocab_size).topk(IDS).indices
    head = fitted(target, torch.cat([own, others[:, 32:]]), ids=frequent.sort().values)
    heads = {
        "its own": head,
        "of all ids": fitted(target, own, ids=torch.arange(target.config.vocab_size)),
        "parallel": parallel(head, features_of(target, own)[0], token=MASK),
        "random": shuffled(head),
        "swapped": swapped(head),
    }
    return Made(heads, texts, features_of(target, texts)[0], target.config.eos_token_id)


class Seen(NamedTuple):
    """What an engine did: the ids of each answer, its passes, and the proposals they accepted."""

    ids: list[list[int]]
    passes: list[int]
    accepted: list[int]

    @property
    def tokens_a_pass(self) -> Rate:
        return Rate.of((p + a, p) for p, a in zip(self.passes, self.accepted, strict=True))


@cache
def seen(engine: str, name: str) -> Seen:
    """What the engine makes of the prompts with a head of `made`, or NOTHING."""
    folder, drafts = Path(mkdtemp()), NOTHING if name == NOTHING else "argmax"
    head = made().heads["its own" if name == NOTHING else name].write(folder / "head")
    export_pair(engine, folder, EMBEDDED, head, gamma=GAMMA)
    launch = Launch(folder=folder, target=EMBEDDED, gamma=GAMMA, drafts=drafts, length=256)
    prompts = made().texts[:, :LENGTH].tolist()
    with serving(engine, launch) as url, httpx.Client(base_url=url, timeout=300) as client:
        ids = [greedy(client, engine, prompt) for prompt in prompts]
        if name == NOTHING:
            return Seen(ids, [], [])
        with Endpoint("engine.url", url) as endpoint:
            answers = Server(endpoint).answers(prompts, sampling=GREEDY, limit=TOKENS, seed=0)
    return Seen(ids, [one.passes for one in answers], [one.accepted for one in answers])


def predicted(engine: str, name: str) -> list[tuple[int, int]]:
    """Tokens and passes of each answer by the formulas."""
    one, pairs = made(), []
    for text, features in zip(one.texts, one.features, strict=True):
        answer = text[LENGTH : LENGTH + TOKENS].tolist()
        last = LENGTH - 1 + (answer.index(one.end) + 1 if one.end in answer else TOKENS)
        ids = proposals(one.heads[name], text, features, GAMMA)
        capped = engine == "llamacpp"
        accepted = rounds(ids, text.tolist(), begin=LENGTH, end=last, capped=capped)
        pairs.append((len(accepted) + sum(accepted), len(accepted)))
    return pairs


def difference(counted: Rate, expected: Rate) -> Estimate:
    """How many more tokens a pass were counted than expected, paired by prompt."""
    return estimate(counted, expected, compare=operator.sub)


HEADS = [
    *(("vllm", name) for name in ("its own", "of all ids", "random", "swapped", "parallel")),
    *(("llamacpp", name) for name in ("its own", "of all ids", "random", "swapped")),
]


@pytest.mark.parametrize(("engine", "name"), HEADS)
def test_answers_are_the_engines_own_and_as_many_are_accepted_as_predicted(
    engine: str, name: str
) -> None:
    installed(engine)
    assert seen(engine, name).ids == seen(engine, NOTHING).ids
    expected = predicted(engine, name)
    counted = seen(engine, name).tokens_a_pass
    assert not difference(counted, Rate.of(expected)).excludes(0)
    # Greedy drafts of a greedy text leave nothing to chance, but for ties.
    pairs = zip(*counted[:2], strict=True)
    same = [pair == (*one,) for pair, one in zip(expected, pairs, strict=True)]
    assert sum(same) >= PROMPTS - 1


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_head_that_is_not_right_accepts_less(engine: str) -> None:
    """So that the test above could have failed."""
    installed(engine)
    own = seen(engine, "its own")
    assert own.tokens_a_pass.mean > 1.3
    assert difference(own.tokens_a_pass, seen(engine, "swapped").tokens_a_pass).low > 0.1
    random = seen(engine, "random")
    proposed = GAMMA * sum(random.passes)  # each would be right once in as many as there are ids
    assert sum(random.accepted) <= 5 * proposed / IDS


@pytest.mark.parametrize(
    ("engine", "name"), [("llamacpp", "its own"), ("vllm", "its own"), ("vllm", "parallel")]
)
def test_measure_engine_counts_of_a_head_what_draftkit_predicts(
    tmp_path: Path, engine: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(engine)
    monkeypatch.setattr(study, "TEMPERATURES", (0.0,))
    head = made().heads[name].write(tmp_path / "head")
    sizes = {"evaluate__prompts": PROMPTS, "evaluate__max_new_tokens": TOKENS}
    rows = [*study.measured(engine, tmp_path, EMBEDDED, head, **sizes)]
    assert [row["drafts"] for row in rows] == list(DRAFTS[engine])
    for row in rows:
        assert row["counted"]["mean"] > 1.1  # it did speculate
        low, high = row["difference"]["ci95"]
        assert low <= 0 <= high
