"""A step of a parallel draft: its chains, and what each weighs, against loops by hand."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import DivergenceConfig, DraftConfig, OptimConfig, SamplingConfig
from draftkit.config.text import PardConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, make_requests
from draftkit.decoding.proposers import ParallelProposer
from draftkit.distillation.assembly import make_trainer
from draftkit.distillation.batch import block_of_record, collate, continued, sequence_of_record
from draftkit.distillation.losses import Objective, StoredTeacher, TargetTeacher
from draftkit.distillation.samplers import DecoderSampler
from draftkit.distillation.scores import stored_scores
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.parallel import Parallel, chains, declare, kept_share
from draftkit.theory.divergences import DIVERGENCES
from tests import tiny
from tests.distillation.fittings import CONFIG
from tests.distillation.making import sampler_of
from tests.records import record

MASK, BLOCKS, CPU = 250, 3, torch.device("cpu")
# The longest first, as micro-batches have them.
TEXTS = [continued([3, 7, 9], [5, 2, 8, 1]), continued([1, 2], [9, 3, 5]), continued([4], [6, 6])]


def draft_of(seed: int = 1, dtype: torch.dtype = torch.float64) -> CausalAdapter:
    model = tiny.model("llama", seed=seed).to(dtype)
    declare(model.config, Parallel(MASK, BLOCKS))
    return CausalAdapter(model.requires_grad_(), vocab_size=tiny.VOCAB_SIZE)


def learner(
    draft: CausalAdapter, teacher: object, plain_share: float = 0.0, **options: object
) -> Trainer:
    settings = {"max_grad_norm": 1e9, "learning_rate": 1e-9, "warmup_steps": 0, "max_steps": 4}
    divergence = DivergenceConfig(name=options.pop("name", "tvd"), **options)
    return Trainer(
        draft,
        teacher,
        Objective(divergence),
        optim=OptimConfig(**settings),
        plain_share=plain_share,
    )


# Which chains


def test_chains_end_with_their_text() -> None:
    batch = collate(TEXTS, device=CPU)
    rows = chains(batch.input_ids, batch.predicting, batch.predicting * BLOCKS, token=MASK)
    entries = list(zip(rows.predicted.tolist(), rows.blocks.tolist(), strict=True))
    texts = batch.predicting.nonzero()[:, 0].tolist()
    expected = {
        (token, block)
        for token in range(len(texts))
        for block in range(BLOCKS)
        if token >= block and texts[token] == texts[token - block]
    }
    assert len(entries) == len(expected)
    assert set(entries) == expected


# What it weighs


def by_hand(draft: CausalAdapter, target: CausalAdapter, depth: dict[int, int], name: str) -> float:
    """The weighted mean over all chains, each text and each chain read by itself."""
    total, whole, token = 0.0, 0.0, 0
    for text in TEXTS:
        ids, begins = torch.tensor([text.token_ids]), text.generated.index(True) - 1
        last = len(text.token_ids) - 1
        law = target.score(ids, torch.ones_like(ids, dtype=torch.bool))
        for begin in range(begins, last):
            for block in range(min(depth[token + begin - begins], last - begin)):
                fed = torch.cat([ids[:, : begin + 1], torch.full((1, block), MASK)], dim=1)
                keep = torch.zeros_like(fed, dtype=torch.bool)
                keep[:, -1] = True
                loss = DIVERGENCES[name](
                    target_logits=law[begin + block],
                    draft_logits=draft.score(fed, keep)[0],
                    token_ids=ids[0, begin + block + 1],
                    settings=DivergenceConfig(),
                )
                weight = 0.7**block / kept_share(block, 0.7)
                total, whole = total + weight * float(loss), whole + weight
        token += last - begins
    return total / whole


@pytest.mark.parametrize("name", ["forward_kl", "tvd", "jsd", "next_token"])
def test_the_loss_is_the_weighted_mean_over_the_kept_chains(name: str) -> None:
    draft, target = draft_of(), tiny.adapter("llama", seed=4, dtype=torch.float64)
    trainer = learner(draft, None if name == "next_token" else TargetTeacher(target), name=name)
    batch = collate(TEXTS, device=CPU)
    entries = trainer._entries(batch)
    reached = torch.zeros(len(batch.token_ids), dtype=torch.long)
    reached.index_put_(
        (entries.predicted - entries.blocks,), torch.ones_like(entries.blocks), accumulate=True
    )
    # A chain that the end of its text cut short counts as deep as it is.
    depth = dict(enumerate(reached.tolist()))
    with torch.no_grad():
        expected = by_hand(draft, target, depth, name)
    metrics = trainer.step(batch, measure=name != "next_token")
    assert metrics.loss == pytest.approx(expected, rel=1e-6)
    assert metrics.tokens == len(batch.token_ids)


def test_alpha_of_a_step_is_that_of_the_first_proposals() -> None:
    target = tiny.adapter("llama", seed=4, dtype=torch.float64)
    plain = tiny.model("llama", seed=1).double().requires_grad_()
    batch, found = collate(TEXTS, device=CPU), []
    for draft in (CausalAdapter(plain, vocab_size=tiny.VOCAB_SIZE), draft_of(1)):
        found.append(learner(draft, TargetTeacher(target)).step(batch, measure=True).alpha)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_the_first_steps_are_those_of_a_plain_drafter() -> None:
    target = tiny.adapter("llama", seed=4, dtype=torch.float64)
    plain = CausalAdapter(
        tiny.model("llama", seed=1).double().requires_grad_(), vocab_size=tiny.VOCAB_SIZE
    )
    batch, losses = collate(TEXTS, device=CPU), {}
    for name, draft, share in (
        ("plain", plain, 0),
        ("first", draft_of(), 0.5),
        ("own", draft_of(), 0),
    ):
        trainer = learner(draft, TargetTeacher(target), plain_share=share)
        losses[name] = [trainer.step(batch).loss for _ in range(4)]
    assert losses["first"][:2] == pytest.approx(losses["plain"][:2], rel=1e-12)
    # The rate is so small that no step changes the next one by as much.
    assert losses["first"][2:] == pytest.approx(losses["own"][2:], rel=1e-6)
    assert losses["own"][0] != pytest.approx(losses["plain"][0], rel=1e-3)


@pytest.mark.parametrize(("is_parallel", "share"), [(False, 0.5), (True, 0.0)])
def test_only_a_drafter_that_becomes_parallel_begins_plainly(
    is_parallel: bool, share: float
) -> None:
    pard = PardConfig(tokens=BLOCKS, plain_share=0.5)
    config = replace(CONFIG, draft=DraftConfig(kind="pard", pard=pard))
    model = tiny.model("llama", seed=1)
    if is_parallel:
        declare(model.config, Parallel(MASK, BLOCKS))
    draft = CausalAdapter(model.requires_grad_(), vocab_size=tiny.VOCAB_SIZE)
    target = tiny.target_of(tiny.adapter("llama", seed=4), tiny.byte_tokenizer(), 0)
    assert make_trainer(config, draft, target)._plain_share == share


def test_stored_scores_give_the_loss_of_the_target_itself_where_they_hold_all() -> None:
    target, sampling = tiny.adapter("llama", seed=4, dtype=torch.float64), SamplingConfig()
    records = [
        record(
            text.token_ids[: text.generated.index(True)],
            text.token_ids[text.generated.index(True) :],
            sampling=sampling,
            row=row,
        )
        for row, text in enumerate(TEXTS)
    ]
    stored = stored_scores(target, records, k=tiny.VOCAB_SIZE - 1, loss_temperature=1.0)
    batch = collate([sequence_of_record(one) for one in stored], device=CPU)
    losses = [
        learner(draft_of(), teacher).step(batch).loss
        for teacher in (TargetTeacher(target), StoredTeacher())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Its own proposals


def blocks_of(draft: CausalAdapter) -> DecoderSampler:
    sampling, own = SamplingConfig(temperature=0.8, top_k=20), {"name": "draft", "is_block": True}
    own |= {"gamma": BLOCKS, "max_new_tokens": BLOCKS, "max_length": 64, "batch_size": 2, "seed": 5}
    return sampler_of(draft, draft=draft, sampling=sampling, **own)


def test_blocks_are_what_the_proposer_proposes() -> None:
    """The same noise gives the same tokens, behind the same text."""
    draft, prompts = draft_of(), [[3, 7, 9], [4], [1, 2, 8, 6]]
    sampled = blocks_of(draft)
    records = sampled.sample(prompts, rows=[4, 9, 2], version="v")
    target = tiny.adapter("llama", seed=4, dtype=torch.float64)
    decoder = Decoder(target, slots=3, capacity=64)
    decoder.attach(DRAFT_ID, ParallelProposer(draft))
    requests = make_requests(
        prompts, max_new_tokens=8, sampling=sampled.sampling, gamma=BLOCKS, seed=5
    )
    rows = zip(requests, [4, 9, 2], strict=True)
    decoder.join([replace(request, row=row) for request, row in rows])
    (result,) = decoder.round()
    assert [record.output_ids for record in records] == result.draft_tokens.tolist()
    assert [record.row for record in records] == [4, 9, 2]
    first, *_ = records[0].output_ids
    short = replace(sampled, max_new_tokens=2, eos_token_ids=[first])
    ended = short.sample(prompts, rows=[4, 9, 2], version="v")
    assert [record.output_ids for record in ended] == [
        [first],
        *(record.output_ids[:2] for record in records[1:]),
    ]


def test_a_block_teaches_the_chain_that_drew_it() -> None:
    """Each proposal against the target's law behind those before it, which the draft never saw."""
    draft, target = draft_of(), tiny.adapter("llama", seed=4, dtype=torch.float64)
    (record,) = blocks_of(draft).sample([[3, 7, 9]], rows=[0], version="v")
    batch = collate([block_of_record(record)], device=CPU)
    metrics = learner(draft, TargetTeacher(target), name="tvd").step(batch)
    ids, total = torch.tensor([[*record.prompt_ids, *record.output_ids]]), 0.0
    with torch.no_grad():
        law = target.score(ids, torch.ones_like(ids, dtype=torch.bool))
        fed = torch.tensor([[*record.prompt_ids, *[MASK] * (BLOCKS - 1)]])
        own = draft_of().score(fed, torch.ones_like(fed, dtype=torch.bool))
        for block in range(BLOCKS):
            p, q = law[2 + block].softmax(-1), own[2 + block].softmax(-1)
            total += 0.7**block * float((p - q).abs().sum() / 2)
    assert metrics.loss == pytest.approx(total / (1 + 0.7 + 0.49), rel=1e-6)
