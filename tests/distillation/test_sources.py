"""What a step sees: which rows, whose text, which tokens carry loss; the same after any kill."""

from dataclasses import replace

import pytest
import torch

from draftkit.config.experiment import MOST_SEED
from draftkit.distillation.batch import block_of_record, sequence_of_record
from draftkit.distillation.loop import train
from draftkit.distillation.sources import cut_texts, row_uniform, shuffled
from tests.distillation.bigram import Bigram, trainer
from tests.distillation.making import (
    BATCH,
    GAMMA,
    LENGTH,
    SAMPLED,
    Killed,
    records,
    rollouts,
    source_of,
)

STEPS, SAVE = 8, 3
SOURCES = ("fixed", *SAMPLED)


def run(folder, name, *, refresh_steps=1, kill_at=None):
    """Train for STEPS steps, or until the step `kill_at` has been taken but not logged."""
    learner = trainer(save_steps=SAVE, eval_steps=6, max_steps=STEPS)
    options = {"refresh_steps": refresh_steps, "max_steps": STEPS}
    source = source_of(name, learner.draft, **options)
    seen = []

    def log(step, metrics):
        if step == kill_at:
            raise Killed
        seen.append((step, metrics["loss"]))

    train(learner, source, folder, evaluate=None, log=log)
    return learner, seen


# The same again, interrupted or not


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing interrupts, each made once."""
    made = {}

    def uninterrupted(name, refresh_steps):
        key = (name, refresh_steps)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[key] = run(folder, name, refresh_steps=refresh_steps)
        return made[key]

    return uninterrupted


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("refresh_steps", "kill_at", "back"),
    # Checkpoints are due every 3 steps, and come where a block of steps begins.
    [(1, 5, 3), (2, 4, 0), (2, 8, 4), (3, 5, 3), (5, 8, 5)],
)
def test_a_killed_run_sees_the_texts_of_an_uninterrupted_one(
    tmp_path, whole, name, refresh_steps, kill_at, back
):
    expected, losses = whole(name, refresh_steps)
    with pytest.raises(Killed):
        run(tmp_path, name, refresh_steps=refresh_steps, kill_at=kill_at)
    resumed, later = run(tmp_path, name, refresh_steps=refresh_steps)
    assert later == losses[-len(later) :]
    assert len(later) == STEPS - (back if name != "fixed" else SAVE * ((kill_at - 1) // SAVE))
    assert torch.equal(resumed.draft.table, expected.draft.table)
    assert resumed.tokens == expected.tokens


def test_texts_of_newer_weights_inside_a_block_would_be_noticed(whole):
    """The check above has power."""
    assert not torch.equal(whole("draft", 5)[0].draft.table, whole("draft", 1)[0].draft.table)


# Whose weights


@pytest.mark.parametrize("name", SAMPLED)
def test_texts_come_from_the_weights_at_the_start_of_their_block(name):
    draft = Bigram(0)
    source = source_of(name, draft, refresh_steps=3)
    first = [source.batch(step) for step in range(3)]
    with torch.no_grad():
        draft.table.fill_(-30.0)
        draft.table[:, 3] = 30.0
    for step in (1, 2):  # whatever the weights are now
        assert torch.equal(source.batch(step).input_ids, first[step].input_ids)
    assert {one.sampler_version for one in records(source)} == {"step 0"}
    source.batch(3)
    assert {one.sampler_version for one in records(source)} == {"step 3"}
    drafted = [token for one in records(source) for token in one.proposals or one.output_ids]
    assert drafted.count(3) > 0.3 * len(drafted)
    if name in ("draft", "block"):
        assert set(drafted) == {3}


def test_batches_differ_from_step_to_step_for_the_same_prompt():
    source = source_of("draft", Bigram(0), refresh_steps=2)
    rows = {tuple(source.batch(step).input_ids.flatten().tolist()) for step in range(7)}
    assert len(rows) == 7


# Mix


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_a_share_of_the_rows_is_the_drafts(fraction):
    """Within 4 standard errors of `fraction`; a share that is 0.1 off would be 6 away."""
    count = 1000
    error = (fraction * (1 - fraction) / count) ** 0.5

    def share(wanted):
        return sum(row_uniform(3, row) < wanted for row in range(count)) / count

    assert abs(share(fraction) - fraction) < 4 * error
    for mutant in (fraction - 0.1, 1 - fraction if fraction != 0.5 else 0.6):
        assert abs(share(mutant) - fraction) > 4 * error


def test_a_mixed_batch_holds_samples_of_the_draft_and_texts_of_others():
    draft = Bigram(0)
    with torch.no_grad():  # the draft says 3 for ever, the other texts end in 1, 4
        draft.table.fill_(-30.0)
        draft.table[:, 3] = 30.0
    source = source_of("mix", draft, fraction=0.4, refresh_steps=2)
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
    assert all(row_uniform(1, record.row) < 0.4 for record in records(source))


# Block


def test_a_block_is_a_piece_of_the_targets_text_and_at_most_gamma_drafted_tokens():
    source = source_of("block", Bigram(0), refresh_steps=50)
    source.batch(0)
    batch = source.batch(1)
    assert set(batch.generated(batch.block_offset).tolist()) <= set(range(GAMMA))
    whole = [r.prompt_ids + r.output_ids for r in rollouts()]
    prompts = [r.prompt_ids for r in rollouts()]
    assert len(records(source)) == 12 * BATCH  # the run ends before the block does
    for record in records(source):
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


# Replay


def test_a_replayed_text_carries_what_was_refused():
    source = source_of("replay", Bigram(0), refresh_steps=2)
    batch = source.batch(0)
    first = records(source)[:BATCH]
    assert {r.sampler for r in first} == {"speculative"}
    assert any(any(r.rejected) for r in first)
    for record in first:
        text, prompt = sequence_of_record(record), len(record.prompt_ids)
        assert text.rejected == [False] * prompt + record.rejected
        assert text.generated == [False] * prompt + [True] * len(record.output_ids)
    assert batch.generated(batch.rejected).tolist() == [f for r in first for f in r.rejected]


# Order


def items(count, rows, lengths=None):
    """The items, of `count`, at these rows, in batches of 16."""
    item_of = shuffled(range(count), 0, lengths=lengths, batch_size=16)
    return [item_of(row) for row in rows]


def test_every_epoch_holds_every_item_once_in_its_own_order():
    epochs = [items(10, range(10 * epoch, 10 * epoch + 10)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert items(10, range(17, 22)) == (epochs[1] + epochs[2])[7:12]


LENGTHS = [(7 * item) % 64 for item in range(1000)]


def spread(batches):
    """Tokens of padding, a batch at a time."""
    return sum(max(LENGTHS[i] for i in b) * len(b) - sum(LENGTHS[i] for i in b) for b in batches)


def test_items_of_like_length_share_a_step_in_every_epoch():
    order, plain = (items(1000, range(3000), lengths) for lengths in (LENGTHS, None))
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
    row = items(1000, range(1500, 1600), LENGTHS)
    assert items(1000, range(1550, 1560), LENGTHS) == row[50:60]
    assert sorted(items(5, range(10, 15), LENGTHS[:5])) == [0, 1, 2, 3, 4]


def test_the_largest_seed_that_is_taken_still_orders_every_epoch():
    order = shuffled(range(5), MOST_SEED)
    epoch = 10**9
    assert sorted(order(5 * epoch + place) for place in range(5)) == [0, 1, 2, 3, 4]
