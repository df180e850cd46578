"""What samplers say of their texts: numbers of rows, limits, and what verification refused."""

from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from tests.decoding.driving import strict_compiler
from tests.distillation.making import sampler_of
from tests.tabular import random_adapter, relative

VOCAB, END = 6, 5
TARGET = random_adapter(VOCAB, 1)
DRAFT = relative(TARGET, 2)
PROMPTS = [[0, 1, 2], [3], [4, 0], [2, 2]] * 8


def plain(**changes):
    given = {"eos_token_ids": [END], "max_new_tokens": 11, "batch_size": 5, "seed": 3}
    return sampler_of(TARGET, **given | changes)


def speculative(gamma, verification="speculative", **changes):
    own = {"name": "speculative", "draft": DRAFT, "gamma": gamma, "verification": verification}
    return plain(**own | changes)


@pytest.mark.parametrize("verification", ["speculative", "block", "match"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_what_was_proposed_in_the_place_of_another_token_was_refused(gamma, verification):
    records = speculative(gamma, verification).sample(PROMPTS, rows=range(9, 41), version="step 2")
    flags, nothing = [], 0
    for record in records:
        for token, proposal, refused in zip(
            record.output_ids, record.proposals, record.rejected, strict=True
        ):
            assert refused == (proposal not in (-1, token))
            flags.append(refused)
            nothing += proposal == -1
    assert 0 < sum(flags) < len(flags)
    assert nothing > 0 or verification == "match"  # which rarely keeps all proposals


def test_a_row_gets_the_same_answer_alone_and_among_others():
    for sampler in (plain(), speculative(2)):
        together = sampler.sample(PROMPTS, rows=range(20, 52), version="v")
        places = [7, 30, 2]
        alone = sampler.sample(
            [PROMPTS[i] for i in places], rows=[20 + i for i in places], version="v"
        )
        assert alone == [together[i] for i in places]


def test_records_say_who_sampled_and_how():
    sampling = SamplingConfig(temperature=0.5)
    (record,) = plain(sampling=sampling).sample([[1, 2]], rows=[8], version="v")
    assert (record.sampler, record.sampler_version) == ("target", "v")
    assert (record.seed, record.row, record.sampling) == (3, 8, vars(sampling))
    assert record.proposals is None
    assert record.rejected is None
    (record,) = speculative(2).sample([[1, 2]], rows=[8], version="step 4")
    assert (record.sampler, record.sampler_version) == ("speculative", "step 4")


def test_answers_keep_to_every_limit():
    short = random_adapter(VOCAB, 2, max_positions=7)
    short_of = {"eos_token_ids": [], "max_length": 9}
    for sampler, lengths in (
        (plain(**short_of), [8, 4]),
        (speculative(2, draft=short, **short_of), [6, 2]),
    ):
        answers = sampler.sample([[0], [0, 1, 2, 3, 4]], rows=[0, 1], version="")
        assert [len(record.output_ids) for record in answers] == lengths


def test_compiled_sampling_keeps_one_decoder_and_answers_as_eager_sampling_does(monkeypatch):
    made, make = [], Decoder.__init__

    def counted(self, *args, compiled=False, **options):
        made.append(self) if compiled else None
        make(self, *args, compiled=compiled, **options)

    monkeypatch.setattr(Decoder, "__init__", counted)
    eager, failing = plain(name="draft", batch_size=4), []

    def watch(done, tokens):
        if failing:
            raise ValueError("in the middle")

    compiled = replace(eager, compiled=True, watch=watch)
    with strict_compiler() as strict:
        for first in range(0, 9, 3):
            prompts, rows = PROMPTS[first : first + 6], range(first, first + 6)
            found = compiled.sample(prompts, rows=rows, version="v")
            assert found == eager.sample(prompts, rows=rows, version="v")
        assert len(made) == strict.made == 1
        failing.append("the rows of a decoder that failed are no one's")
        with pytest.raises(ValueError, match="in the middle"):
            compiled.sample(PROMPTS[:1], rows=[0], version="v")
        failing.clear()
        assert compiled.sample(PROMPTS[:1], rows=[0], version="v") != []
        assert len(made) == 2


def test_nothing_is_asked_where_there_is_no_prompt():
    for sampler in (plain(), speculative(2)):
        assert sampler.sample([], rows=[], version="") == []
