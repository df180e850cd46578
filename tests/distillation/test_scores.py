"""Which ids the target stores at every token, and that they teach what it would."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig, SamplingConfig, SourceConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import collate, sequence_of_record
from draftkit.distillation.losses import Objective, Outcomes, StoredTeacher, TargetTeacher
from draftkit.distillation.scores import sampled_scores, scored_by, stored_scores, texts_to_score
from draftkit.distillation.sources import TrainingTexts
from tests import tiny
from tests.distillation.bigram import CPU, VOCAB, Bigram
from tests.distillation.fittings import CONFIG
from tests.distillation.making import sampler_of
from tests.records import record

TEXT = Example([5, 6, 7, 8], [False, False, True, True], "a.txt", "prose")


def test_texts_of_the_data_are_scored_as_if_they_had_been_sampled() -> None:
    config = replace(CONFIG, source=SourceConfig(name="fixed"))
    (record,) = texts_to_score(config, TrainingTexts([TEXT], Room(9, 9)))
    assert (record.prompt_ids, record.output_ids) == ([5, 6], [7, 8])
    assert (record.document, record.domain, record.row) == ("a.txt", "prose", 0)


def test_the_ids_of_every_token_are_the_targets_likeliest_there() -> None:
    target = tiny.adapter()
    config = replace(CONFIG, source=SourceConfig(name="fixed"))
    texts = [replace(TEXT, token_ids=[5, 6, 7 + n, 8]) for n in range(20)]  # more than one batch
    records = texts_to_score(config, TrainingTexts(texts, Room(9, 9)))
    scored = scored_by(target, records, top_k=3, temperature=1.0)
    assert [record.output_ids for record in scored] == [[7 + n, 8] for n in range(20)]
    with torch.no_grad():
        logits = target.model(torch.tensor([texts[18].token_ids])).logits[0, 1:3]
    assert scored[18].topk_ids == logits.topk(3).indices.tolist()


def test_texts_of_like_lengths_share_a_pass_and_come_back_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, widths = tiny.adapter(), list[int]()
    read = type(target).read

    def noted(self: Any, tokens: torch.Tensor, *arguments: Any) -> Any:
        widths.append(tokens.shape[1])
        return read(self, tokens, *arguments)

    monkeypatch.setattr(type(target), "read", noted)
    served = SamplingConfig()
    records = [record([3], [4] * (1 + 7 * n % 20), sampling=served) for n in range(20)]
    scored = scored_by(target, records, top_k=3, temperature=1.0)
    assert [one.output_ids for one in scored] == [one.output_ids for one in records]
    assert widths == [1 + 8, 1 + 16, 1 + 20]


def sampled(target: Any, temperature: float, top_k: int = 4) -> list[Record]:
    sampling = SamplingConfig(temperature=temperature, top_p=0.9)
    options = {"eos_token_ids": [1], "batch_size": 3, "seed": 2, "top_k": top_k}
    sampler = sampler_of(target, sampling=sampling, **options)
    return sampler.sample(tiny.prompts([3, 9, 1, 14]), rows=[*range(4)], version="")


@pytest.mark.parametrize(("served", "loss"), [(0.6, 0.6), (0.6, 1.0), (0.0, 1.0), (1.0, 1.0)])
def test_scores_of_rollouts_are_those_of_a_second_pass(served: float, loss: float) -> None:
    target = tiny.adapter()
    records = sampled(target, served)
    kept = scored_by(target, records, top_k=4, temperature=loss)
    again = stored_scores(target, records, k=4, loss_temperature=loss)
    assert [record.topk_ids for record in kept] == [record.topk_ids for record in again]
    for name in ("topk_log_probs", "tail_mass", "loss_tail_mass"):
        for ours, theirs in zip(kept, again, strict=True):
            own, fresh = (torch.tensor(getattr(one, name)) for one in (ours, theirs))
            torch.testing.assert_close(own, fresh, atol=1e-5, rtol=1e-5)
    assert max(max(record.loss_tail_mass or []) for record in kept) > 0.01


def test_a_loss_at_a_third_temperature_takes_a_second_pass() -> None:
    target = tiny.adapter()
    records = sampled(target, 0.6)
    assert sampled_scores(records, loss_temperature=0.8) is None
    assert sampled_scores(sampled(target, 0.6, top_k=0), loss_temperature=0.6) is None
    kept = scored_by(target, records, top_k=4, temperature=0.8)
    assert kept == stored_scores(target, records, k=4, loss_temperature=0.8)


TEXTS = [([1, 2], [3, 4, 5]), ([0], [6, 6]), ([5, 4, 3, 2], [1])]


def records(temperature=1.0):
    return [
        record(prompt, output, sampling=SamplingConfig(temperature=temperature), row=row)
        for row, (prompt, output) in enumerate(TEXTS)
    ]


def batch_and_scores(k, temperature):
    """A batch with stored scores, and what target and store make of it."""
    target = Bigram(1, spread=2.0)
    scored = stored_scores(target, records(), k=k, loss_temperature=temperature)
    batch = collate([sequence_of_record(one) for one in scored], device=CPU)
    return batch, TargetTeacher(target).score(batch)[0], StoredTeacher().score(batch)[0]


def outcomes_without(never):
    """All ids but those of `never` [V]."""
    return None if never is None else Outcomes.of((~never).nonzero()[:, 0], VOCAB)


def losses(scores, batch, name, temperature, never=None, sampling=None):
    draft, outcomes = Bigram(2), outcomes_without(never)
    objective = Objective(
        DivergenceConfig(name=name), sampling or SamplingConfig(), temperature, outcomes=outcomes
    )
    logits = draft.states(batch.input_ids, batch.predicting)
    return objective.losses(
        scores=scores if outcomes is None else scores.among(outcomes),
        draft_logits=logits,
        token_ids=batch.token_ids,
        rows=slice(None),
        step=0,
    )


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=3, top_p=0.9)])
def test_all_ids_but_one_teach_what_the_target_does(name, temperature, sampling):
    batch, full, stored = batch_and_scores(VOCAB - 1, temperature)
    found = losses(stored, batch, name, temperature, sampling=sampling)
    expected = losses(full, batch, name, temperature, sampling=sampling)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # stored in float32


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_few_ids_teach_finitely_even_where_the_draft_has_none_of_them(name):
    batch, _, stored = batch_and_scores(2, 1.0)
    best = stored.ids[:, 0].unique()
    never = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, best, True)
    for sampling in (SamplingConfig(), SamplingConfig(top_k=1)):
        values = losses(stored, batch, name, 1.0, never, sampling)
        assert values.isfinite().all()
        values.sum().backward()


def test_where_the_draft_has_no_stored_id_the_target_says_another_token():
    _, _, stored = batch_and_scores(2, 1.0)
    never = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, stored.ids[0], True)
    outcomes, first = outcomes_without(never), slice(0, 1)
    warp = Objective(DivergenceConfig(), SamplingConfig(top_k=1), 1.0).warp("forward_kl")
    logits = outcomes.logits(torch.zeros(1, VOCAB))
    target_logits, _ = stored.among(outcomes).beside(logits, first, warp)
    assert target_logits.tolist() == [[-torch.inf, -torch.inf, 0.0]]


def test_the_best_id_is_one_that_the_draft_can_propose():
    _, full, stored = batch_and_scores(VOCAB - 1, 1.0)
    warp = Objective(DivergenceConfig()).warp("ce_argmax")
    assert torch.equal(stored.best(slice(None), warp), full.best(slice(None), warp))
    never = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, stored.ids[:, 0].unique(), True)
    outcomes = outcomes_without(never)
    best = stored.among(outcomes).best(slice(None), warp)
    assert torch.equal(best, full.among(outcomes).best(slice(None), warp))
    assert not never[outcomes.kept_ids[best]].any()


def test_the_mass_of_all_others_is_kept_at_both_temperatures():
    scored = stored_scores(Bigram(1), records(0.5), k=3, loss_temperature=1.0)
    assert [len(one.topk_ids) for one in scored] == [3, 2, 1]
    assert scored[0].tail_mass != scored[0].loss_tail_mass  # at 0.5 and at 1
    p = Bigram(1).table[scored[0].prompt_ids[-1]].detach().softmax(-1)
    assert scored[0].loss_tail_mass[0] == pytest.approx(1 - float(p.topk(3).values.sum()), rel=1e-5)


def test_texts_without_scores_are_refused_with_the_way_out():
    batch = collate([sequence_of_record(one) for one in records()], device=CPU)
    with pytest.raises(ValueError, match=r"^generate\.top_k: .* use source=target or fixed"):
        StoredTeacher().score(batch)
    with pytest.raises(ValueError, match=r"^generate\.top_k: 8 of 8 ids"):
        stored_scores(Bigram(1), records(), k=8, loss_temperature=1.0)
