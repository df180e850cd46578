"""Which texts the target scores, and that what is stored are its own most likely ids."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig, SourceConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.distillation.samplers import DecoderSampler
from draftkit.distillation.scores import sampled_scores, scored_by, stored_scores, texts_to_score
from draftkit.distillation.sources import TrainingTexts
from tests import tiny
from tests.distillation.fittings import CONFIG

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


def sampled(target: Any, temperature: float, top_k: int = 4) -> list[Record]:
    sampler = DecoderSampler(
        model=target,
        name="target",
        sampling=SamplingConfig(temperature=temperature, top_p=0.9),
        eos_token_ids=[1],
        max_new_tokens=9,
        max_length=99,
        batch_size=3,
        seed=2,
        top_k=top_k,
    )
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
