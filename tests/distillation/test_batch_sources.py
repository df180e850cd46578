"""What a step sees: which rows, whose text, which tokens carry loss; the same after any kill."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import OptimConfig
from draftkit.config.experiment import MOST_SEED
from draftkit.data.rollouts import read_records
from draftkit.distillation import batch_sources
from draftkit.distillation.batch import TokenSequence, block_of_record, sequence_of_record
from draftkit.distillation.batch_sources import (
    Grouping,
    cut_texts,
    row_uniform,
    shuffled,
    some_rows,
)
from draftkit.distillation.loop import train
from tests.distillation.bigram import VOCAB, Bigram, trainer
from tests.distillation.making import (
    BATCH,
    GAMMA,
    LENGTH,
    PROMPTS,
    SAMPLED,
    TEXTS,
    block_source,
    draft_source,
    mix_source,
    replay_source,
    rollouts,
    text_source,
)

STEPS, SAVE = 8, 3
SOURCES = {"text": text_source, **SAMPLED}


class Killed(Exception):
    """The process ended here."""


def run(folder, make_source, *, refresh_steps=1, kill_at=None):
    """Train for STEPS steps, or until the step `kill_at` has been taken but not logged."""
    options = {"save_steps": SAVE, "eval_steps": 6, "max_steps": STEPS}
    learner = trainer(**options)
    source = make_source(
        learner.draft, folder, refresh_steps=refresh_steps, optim=OptimConfig(**options)
    )
    seen = []

    def log(progress):
        if progress.steps == kill_at:
            raise Killed
        seen.append((progress.steps, progress.metrics.loss))

    train(learner, source, folder, evaluate=None, log=log)
    return learner, seen


def kept(folder):
    """The files of rollouts by name, with their records."""
    return {path.name: read_records(path) for path in (folder / "rollouts").glob("*")}


# The same again, interrupted or not


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing interrupts, each made once."""
    made = {}

    def uninterrupted(name, refresh_steps):
        key = (name, refresh_steps)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[key] = (*run(folder, SOURCES[name], refresh_steps=refresh_steps), kept(folder))
        return made[key]

    return uninterrupted


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("refresh_steps", "kill_at"),
    # Checkpoints come after steps 3, 6 and 8, so these go on at 3, at 3 inside the blocks of 2 and
    # 5 steps and at the edge of one of 3, and at 6 inside one of 5.
    [(1, 5), (2, 4), (3, 5), (5, 5), (5, 8)],
)
def test_a_killed_run_sees_the_texts_of_an_uninterrupted_one(
    tmp_path, whole, name, refresh_steps, kill_at
):
    expected, losses, files = whole(name, refresh_steps)
    with pytest.raises(Killed):
        run(tmp_path, SOURCES[name], refresh_steps=refresh_steps, kill_at=kill_at)
    resumed, later = run(tmp_path, SOURCES[name], refresh_steps=refresh_steps)
    assert later == losses[-len(later) :]
    assert len(later) == STEPS - SAVE * ((kill_at - 1) // SAVE)
    assert torch.equal(resumed.draft.table, expected.draft.table)
    assert resumed.tokens == expected.tokens
    assert kept(tmp_path) == files


def test_kills_again_and_again_in_one_block_change_nothing(tmp_path, whole):
    expected, _, _ = whole("draft", 5)
    for kill_at in (4, 5, 7, 8):
        with pytest.raises(Killed):
            run(tmp_path, draft_source, refresh_steps=5, kill_at=kill_at)
    resumed, _ = run(tmp_path, draft_source, refresh_steps=5)
    assert torch.equal(resumed.draft.table, expected.draft.table)


def test_texts_sampled_again_inside_a_block_would_be_noticed(tmp_path, whole):
    """The check above has power: without its file, a block would go on with newer weights."""
    expected, _, _ = whole("draft", 5)
    with pytest.raises(Killed):
        run(tmp_path, draft_source, refresh_steps=5, kill_at=5)
    resumed, _ = run(tmp_path, draft_source, refresh_steps=1)
    assert not torch.equal(resumed.draft.table, expected.draft.table)


def test_a_block_whose_file_is_gone_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, draft_source, refresh_steps=2, kill_at=5)
    (tmp_path / "rollouts" / "step-00000002.parquet").unlink()
    line = r"step-00000002\.parquet.*step 3.*overwrite=true"
    with pytest.raises(ValueError, match=line) as error:
        run(tmp_path, draft_source, refresh_steps=2)
    assert "\n" not in str(error.value)


# Whose weights


@pytest.mark.parametrize("name", SAMPLED)
def test_texts_come_from_the_weights_at_the_start_of_their_block(tmp_path, name):
    draft = Bigram(0)
    source = SAMPLED[name](draft, tmp_path, refresh_steps=3)
    first = [source.batch(step) for step in range(3)]
    with torch.no_grad():
        draft.table.fill_(-30.0)
        draft.table[:, 3] = 30.0
    again = SAMPLED[name](draft, tmp_path, refresh_steps=3)
    for step in (1, 2):  # from the file, whatever the weights are now
        for one in (source, again):
            assert torch.equal(one.batch(step).input_ids, first[step].input_ids)
    assert [batch.sampler_version for batch in first] == ["step 0"] * 3
    changed = source.batch(3)
    assert changed.sampler_version == "step 3"
    records = kept(tmp_path)["step-00000003.parquet"]
    drafted = [token for record in records for token in record.proposals or record.output_ids]
    assert drafted.count(3) > 0.3 * len(drafted)
    if name in ("draft", "block"):
        assert set(drafted) == {3}


@pytest.mark.parametrize("refresh_steps", [1, 2, 5])
def test_no_text_is_older_than_refresh_steps_less_one(tmp_path, refresh_steps):
    draft = Bigram(0)
    source = draft_source(draft, tmp_path, refresh_steps=refresh_steps)
    ages = []
    for step in range(11):
        batch = source.batch(step)
        sampled_at = int(batch.sampler_version.removeprefix("step "))
        ages.append(step - sampled_at)
        with torch.no_grad():  # weights that tell in which step they were used
            draft.table.fill_(-30.0)
            draft.table[:, 1 + (step + 1) % (VOCAB - 1)] = 30.0
        if sampled_at > 0:
            assert set(batch.token_ids.tolist()) == {1 + sampled_at % (VOCAB - 1)}
    assert max(ages) == refresh_steps - 1
    assert min(ages) == 0


def test_a_step_sampled_again_follows_the_weights_of_the_moment(tmp_path):
    draft = Bigram(0)
    source = draft_source(draft, tmp_path)
    first = source.batch(0)
    assert torch.equal(first.input_ids, source.batch(0).input_ids)
    with torch.no_grad():
        draft.table.fill_(-30.0)
        draft.table[:, 3] = 30.0
    assert source.batch(0).token_ids.unique().tolist() == [3]


def test_batches_differ_from_step_to_step_for_the_same_prompt(tmp_path):
    source = draft_source(Bigram(0), tmp_path, refresh_steps=2)
    rows = {tuple(source.batch(step).input_ids.flatten().tolist()) for step in range(7)}
    assert len(rows) == 7


def test_an_answer_ends_with_its_first_end_of_text(tmp_path):
    batch = draft_source(Bigram(0, spread=0.1), tmp_path).batch(0)
    for ids, mask in zip(batch.input_ids, batch.loss_mask, strict=True):
        generated = ids[mask].tolist()
        assert 0 not in generated[:-1]


def test_what_is_kept_says_who_sampled_it_when_and_for_which_row(tmp_path):
    source = draft_source(Bigram(0), tmp_path, refresh_steps=2)
    batches = [source.batch(2), source.batch(3)]
    records = kept(tmp_path)["step-00000002.parquet"]
    assert {(r.sampler, r.sampler_version) for r in records} == {("draft", "step 2")}
    assert [r.row for r in records] == list(range(2 * BATCH, 4 * BATCH))
    for place, record in enumerate(records):
        row = batches[place // BATCH].input_ids[place % BATCH].tolist()
        text = record.prompt_ids + record.output_ids
        assert row[: len(text)] == text


# Mix


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_a_share_of_the_rows_is_the_drafts(fraction):
    """Within 4 standard errors of `fraction`; a share that is 0.1 off would be 6 away."""
    count = 1000
    error = (fraction * (1 - fraction) / count) ** 0.5

    def share(wanted):
        chosen = some_rows(shuffled(PROMPTS, 0), fraction=wanted, seed=3)
        return sum(chosen(row) is not None for row in range(count)) / count

    assert abs(share(fraction) - fraction) < 4 * error
    for mutant in (fraction - 0.1, 1 - fraction if fraction != 0.5 else 0.6):
        assert abs(share(mutant) - fraction) > 4 * error


def test_choices_of_rows_are_independent_of_each_other_and_of_the_seed():
    choices = torch.tensor([row_uniform(1, row) < 0.5 for row in range(1000)]).double()
    others = torch.tensor([row_uniform(2, row) < 0.5 for row in range(1000)]).double()
    for one, other in ((choices[1:], choices[:-1]), (choices, others), (choices[3:], choices[:-3])):
        both = float((one * other).mean())
        assert abs(both - 0.25) < 4 * (0.25 * 0.75 / 1000) ** 0.5


def test_a_mixed_batch_holds_samples_of_the_draft_and_texts_of_others(tmp_path):
    draft = Bigram(0)
    with torch.no_grad():  # the draft says 3 for ever, the other texts end in 1, 4
        draft.table.fill_(-30.0)
        draft.table[:, 3] = 30.0
    source = mix_source(draft, tmp_path, fraction=0.4, refresh_steps=2)
    drafted = 0
    for step in range(12):
        batch = source.batch(step)
        for place in range(BATCH):
            row = step * BATCH + place
            generated = batch.input_ids[place][batch.loss_mask[place]].tolist()
            is_drafted = row_uniform(1, row) < 0.4
            assert generated == ([3] * (LENGTH - 2) if is_drafted else [1, 4])
            drafted += is_drafted
    assert 0 < drafted < 12 * BATCH
    records = [record for records in kept(tmp_path).values() for record in records]
    assert all(row_uniform(1, record.row) < 0.4 for record in records)


def test_the_other_texts_of_a_mix_are_all_met(tmp_path):
    source = mix_source(Bigram(0), tmp_path, fraction=0.1)
    met = set()
    for step in range(30):
        batch = source.batch(step)
        met |= {tuple(row[:4].tolist()) for row in batch.input_ids}
    assert {tuple(text.token_ids) for text in TEXTS} <= met


# Block


def test_a_block_is_a_piece_of_the_targets_text_and_at_most_gamma_drafted_tokens(tmp_path):
    source = block_source(Bigram(0), tmp_path, refresh_steps=50)
    source.batch(0)
    batch = source.batch(1)
    assert set(batch.generated(batch.block_offset).tolist()) <= set(range(GAMMA))
    whole = [r.prompt_ids + r.output_ids for r in rollouts()]
    prompts = [r.prompt_ids for r in rollouts()]
    (records,) = kept(tmp_path).values()
    assert len(records) == 12 * BATCH
    for record in records:
        assert any(text[: len(record.prompt_ids)] == record.prompt_ids for text in whole)
        assert any(record.prompt_ids[: len(prompt)] == prompt for prompt in prompts)
        assert 1 <= len(record.output_ids) <= GAMMA
        room = LENGTH - len(record.prompt_ids)
        ended = record.output_ids[-1] == 0
        assert ended or len(record.output_ids) == min(GAMMA, room)


def test_loss_is_on_the_drafted_tokens_alone_and_each_knows_its_place():
    record = replace(rollouts()[0], prompt_ids=[5, 6, 7, 1], output_ids=[2, 3, 4])
    text = block_of_record(record)
    assert text.token_ids == [5, 6, 7, 1, 2, 3, 4]
    assert text.generated == [False] * 4 + [True] * 3
    assert text.block_offset == [0] * 4 + [0, 1, 2]
    assert text.rejected is None


def test_cuts_are_uniform_over_the_positions_of_an_output():
    """Chi-square against uniform, and a mutant that never cuts at the start fails it."""
    record = rollouts()[0]
    record = replace(record, output_ids=[1, 2, 3, 4, 5])

    def statistic(first):
        prompt_of = cut_texts([record], seed=2)
        counts = torch.zeros(5)
        for row in range(1000):
            place = len(prompt_of(row)) - len(record.prompt_ids)
            counts[max(first, place)] += 1
        return float(((counts - 200) ** 2 / 200).sum())

    assert statistic(0) < 18.5  # 0.999 of chi-square with 4 degrees of freedom
    assert statistic(1) > 50


def test_cuts_use_every_rollout_and_depend_on_seed_and_row_alone():
    records = rollouts()
    first = [cut_texts(records, seed=2)(row) for row in range(30)]
    assert [cut_texts(records, seed=2)(row) for row in reversed(range(30))] == first[::-1]
    assert [cut_texts(records, seed=3)(row) for row in range(30)] != first


# Replay


def test_texts_of_a_step_that_nothing_goes_on_inside_of_are_in_no_file(tmp_path):
    replay_source(Bigram(0), tmp_path).batch(0)
    assert not kept(tmp_path)


def test_a_replayed_text_carries_what_was_refused(tmp_path, monkeypatch):
    seen = []
    collate = batch_sources.collate
    monkeypatch.setattr(
        batch_sources,
        "collate",
        lambda rows, **options: seen.extend(rows) or collate(rows, **options),
    )
    batch = replay_source(Bigram(0), tmp_path, refresh_steps=2).batch(0)
    records = kept(tmp_path)["step-00000000.parquet"][: len(seen)]
    assert {r.sampler for r in records} == {"speculative"}
    assert any(any(r.rejected) for r in records)
    for record, text in zip(records, seen, strict=True):
        prompt = len(record.prompt_ids)
        assert text.rejected == [False] * prompt + record.rejected
        assert text.generated == [False] * prompt + [True] * len(record.output_ids)
    assert batch.generated(batch.rejected).tolist() == [f for r in records for f in r.rejected]


def test_a_plain_rollout_says_nothing_of_refusals():
    record = rollouts()[0]
    text = sequence_of_record(record)
    assert text == TokenSequence(
        record.prompt_ids + record.output_ids,
        [False] * len(record.prompt_ids) + [True] * len(record.output_ids),
    )


# Order


def items(count, rows, grouping=None):
    """The items, of `count`, at these rows."""
    item_of = shuffled(range(count), 0, grouping)
    return [item_of(row) for row in rows]


def test_every_epoch_holds_every_item_once_in_its_own_order():
    epochs = [items(10, range(10 * epoch, 10 * epoch + 10)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert items(10, range(17, 22)) == (epochs[1] + epochs[2])[7:12]


LENGTHS = [(7 * item) % 64 for item in range(1000)]
SPREAD = Grouping(LENGTHS, batch_size=16)


def spread(batches):
    """Tokens of padding, a batch at a time."""
    return sum(max(LENGTHS[i] for i in b) * len(b) - sum(LENGTHS[i] for i in b) for b in batches)


def test_items_of_like_length_share_a_step_in_every_epoch():
    order, plain = (items(1000, range(3000), grouping) for grouping in (SPREAD, None))
    for epoch in range(3):
        assert sorted(order[1000 * epoch : 1000 * (epoch + 1)]) == list(range(1000))
    steps = range(0, 2992, 16)  # of all epochs: the second does not begin with a step
    together, apart = ([one[step : step + 16] for step in steps] for one in (order, plain))
    assert spread(together) < 0.1 * spread(apart)
    assert {frozenset(batch) for batch in together[:62]} != {
        frozenset(batch) for batch in together[63:125]
    }
    lengths = [LENGTHS[batch[0]] for batch in together[:62]]
    assert lengths != sorted(lengths)  # the batches themselves come in any order


def test_grouped_items_are_addressed_like_others():
    row = items(1000, range(1500, 1600), SPREAD)
    assert items(1000, range(1550, 1560), SPREAD) == row[50:60]
    few = Grouping(LENGTHS[:5], batch_size=16)
    assert sorted(items(5, range(10, 15), few)) == [0, 1, 2, 3, 4]


def test_the_largest_seed_that_is_taken_still_orders_every_epoch():
    order = shuffled(range(5), MOST_SEED)
    epoch = 10**9
    assert sorted(order(5 * epoch + place) for place in range(5)) == [0, 1, 2, 3, 4]
