"""The losslessness check passes for the real decoder and fails for one that is not exact."""

import copy
import math

import pytest
import torch

from draftkit.config import DataConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.data.corpora import read_documents
from draftkit.decoding import round as units
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.trees import usual_tree
from draftkit.evaluation import lossless
from draftkit.evaluation.lossless import (
    Losslessness,
    binomial_tail,
    check_proposers,
    decoded_identity,
    differ_by_rounding,
    sampled_surprise,
)
from draftkit.evaluation.walltime import Setting
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import load_target
from draftkit.theory.verification import Verification, greedy_verification
from tests import tiny
from tests.tabular import TabularAdapter, random_adapter

VOCAB = 8
SHAPES = ((1, 3), (4, 3), (4, 1))
PROMPTS = [[token] for token in range(VOCAB)]


def table(seed):
    """A model whose next token hangs on the last two."""
    return TabularAdapter(random_adapter(VOCAB, seed).table)


def check(target, draft, prompts=PROMPTS, tokens=12, batch_size=3):
    found = check_proposers(
        target,
        {"draft": DraftModelProposer(draft)},
        prompts,
        max_new_tokens=tokens,
        gamma=3,
        batch_size=batch_size,
        eos_token_ids=(),
    )
    return found["draft"]


def test_a_draft_of_any_quality_passes():
    for seed in (0, 1, 2):
        found = check(table(0), table(seed))
        assert found.passed
        assert (found.compared, found.mismatches) == (8, 0)


def accept_everything(*, target_probs, draft_tokens, lengths):
    return Verification(lengths, target_probs[:, -1].argmax(-1))


@pytest.mark.parametrize(("gap", "tolerated"), [(1e-7, True), (1e-3, False)])
def test_a_mismatch_is_tolerated_only_where_the_two_best_logits_nearly_tie(
    monkeypatch, gap, tolerated
):
    target = table(0)
    best = target.table.amax(-1)
    target.table[..., 3] = best + 1
    target.table[..., 5] = best + 1 + gap
    draft = table(1)
    draft.table[..., 3] = 50  # always proposes the second best
    monkeypatch.setattr(units, "greedy_verification", accept_everything)
    found = check(target, draft)
    assert found.mismatches == 8
    assert found.near_ties == (8 if tolerated else 0)
    assert found.passed is tolerated


HALF_PROMPTS = tiny.prompts([5, 9, 12, 7] * 4)


def accept_one_too_many(*, target_probs, draft_tokens, lengths):
    right = greedy_verification(
        target_probs=target_probs, draft_tokens=draft_tokens, lengths=lengths
    )
    accepted = (right.accepted + 1).minimum(lengths)
    return Verification(accepted, target_probs[range(len(accepted)), accepted].argmax(-1))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float32), ("gemma2", torch.bfloat16)],
)
def test_a_decoder_that_accepts_one_proposal_too_many_is_caught(monkeypatch, architecture, dtype):
    target, draft = tiny.pair(architecture, dtype=dtype)
    assert check(target, draft, HALF_PROMPTS).passed
    monkeypatch.setattr(units, "greedy_verification", accept_one_too_many)
    found = check(target, draft, HALF_PROMPTS).as_dict()
    assert found["passed"] is False
    assert found["statistic"] > 0


def test_what_follows_a_near_tie_must_be_the_best_as_well():
    target = table(0)
    best = target.table.amax(-1)
    target.table[..., 3] = best + 1
    target.table[..., 5] = best + 1 + 1e-7

    def answer(*ids):
        return Completion([0], list(ids))

    plain = answer(5, 5, 5, 5)
    pairs = [
        (plain, answer(5, 3, 5, 3)),
        (answer(3, 3, 3, 3), answer(5, 5, 5, 5)),
        (plain, answer(5, 3, 1, 5)),
        (answer(5, 1, 5, 5), answer(5, 3, 5, 5)),
        (plain, answer(5, 5)),  # it ends early
    ]
    plain, drafted = zip(*pairs, strict=True)

    def same_again(rows):
        return plain

    found = decoded_identity(target, plain, drafted, width=4, rows=3, again=same_again)
    assert (found.mismatches, found.near_ties) == (5, 2)
    parted = {0: 1, 1: 0, 2: 1, 3: 1}
    ties = differ_by_rounding(target, plain, drafted, SHAPES, parted)
    assert ties == [True, True, False, False]


def noisy(target, *, seed=0):
    """A drafter that agrees with `target` in two tokens of three: its weights with noise."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.dim() > 1):
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((0.2 * weight.float().std() * noise).to(weight.dtype))
    return CausalAdapter(model, vocab_size=target.vocab_size)


def rounding_pair(kind, count):
    """Target and drafter in bfloat16, `count` prompts, and the tokens of an answer."""
    if kind == "random":
        return *tiny.pair(dtype=torch.bfloat16), tiny.prompts([5, 9, 12, 7] * count)[:count], 24
    hardware = HardwareConfig(device="cpu", dtype="bfloat16")
    target = load_target(TargetConfig(path="draftkit/embedded"), hardware)
    texts = [one.row["text"] for one in read_documents(DataConfig(domains=["prose"], max_rows=120))]
    pieces = [text[i : i + 200] for text in texts for i in range(0, len(text) - 200, 400)]
    prompts = [target.tokenizer(text)["input_ids"][:32] for text in pieces[:count]]
    assert len(prompts) == count
    return target.adapter, noisy(target.adapter), prompts, 40


def lossy_by(monkeypatch, nats):
    """Let greedy rounds accept what lies less than `nats` below the best token."""

    def accept(*, target_probs, draft_tokens, lengths):
        gamma = draft_tokens.shape[1]
        proposed = target_probs[:, :gamma].gather(-1, draft_tokens[..., None])[..., 0]
        passes = target_probs.amax(-1)[:, :gamma] - proposed < nats
        passes &= torch.arange(gamma) < lengths[:, None]
        accepted = passes.long().cumprod(-1).sum(-1)
        return Verification(accepted, target_probs[range(len(accepted)), accepted].argmax(-1))

    monkeypatch.setattr(units, "warp", lambda logits, *_: logits.float())
    monkeypatch.setattr(units, "greedy_verification", accept)


def test_in_bfloat16_a_decoder_that_is_lossy_by_half_a_nat_fails_and_a_sound_one_passes(
    monkeypatch,
):
    pair = rounding_pair("random", 12)
    assert check(*pair, batch_size=4).passed
    lossy_by(monkeypatch, 0.5)
    found = check(*pair, batch_size=4)
    assert found.passed is False
    assert found.mismatches > found.near_ties


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["embedded", "random"])
def test_in_bfloat16_thirty_sound_runs_pass_and_lossy_ones_fail(monkeypatch, kind):
    target, draft, prompts, tokens = rounding_pair(kind, 360)
    ties = 0
    for run in range(36):
        sound, place = run < 30, 12 * (run % 30)
        if run == 30:
            lossy_by(monkeypatch, 0.5)
        some = prompts[place : place + 12]
        found = check(target, draft, some, tokens, batch_size=(4, 6, 12)[run % 3])
        assert found.passed is sound, (run, found)
        ties += found.near_ties
    assert ties > 0


def test_more_near_ties_than_plain_decoding_has_with_itself_are_a_fault(monkeypatch):
    """Though each of them lies within the rounding of its place."""
    pair = rounding_pair("random", 16)
    lossy_by(monkeypatch, 0.5)
    everything = "draftkit.evaluation.lossless.differ_by_rounding"
    monkeypatch.setattr(everything, lambda *answers: [True] * len(answers[-1]))
    found = check(*pair, batch_size=4)
    assert found.mismatches == found.near_ties > 9
    assert found.passed is False
    assert found.p_value == found.as_dict()["p_value"] < 1e-3
    assert "at near-ties, more than by rounding" in found.fault
    as_many = Losslessness(32, 12, 12, torch.bfloat16, binomial_tail(12, 8))
    assert as_many.passed


def test_the_tail_of_the_test_is_counted_exactly():
    assert binomial_tail(10, 0) == 2**-10
    assert binomial_tail(0, 5) == 1
    assert math.isclose(binomial_tail(3, 1), 5 / 16)


def test_answers_of_an_encoder_decoder_model_are_read_again_as_others():
    """With what its encoder reads, in passes of any shape."""
    target, _ = tiny.seq2seq_pair()
    rows = [[*text, tiny.START] for text in tiny.prompts([5, 9, 3])]
    requests = make_requests(rows, max_new_tokens=6, sampling=SamplingConfig(temperature=0.0))
    plain = decode(target, list(requests), eos_token_ids=(), batch_size=3)
    other = copy.deepcopy(plain[0])
    other.output_ids[2] = (other.output_ids[2] + 1) % 250
    assert differ_by_rounding(target, plain, [other], SHAPES, {0: 2}) == [False]
    gaps = lossless._gaps(target, plain, shape=(4, 3))
    assert [one[0].tolist() for one in gaps] == [[0] * 6] * 3


# Typical acceptance


def surprised(*, verification="match", tree=None, temperature=1.0, seed=0):
    """What the check of sampled answers says of a fair draft."""
    target, draft = table(0), table(1)
    setting = Setting(
        sampling=SamplingConfig(temperature=temperature, top_p=0.9),
        max_new_tokens=40,
        gamma=3,
        verification=verification,
        epsilon=0.09 if verification == "typical" else None,
        batch_size=8,
        capacity=64,
        seed=seed,
    )
    proposer = DraftModelProposer(draft, tree=tree)
    return sampled_surprise(target, {"draft": proposer}, PROMPTS, setting)["draft"]


@pytest.mark.parametrize("tree", [None, usual_tree(6, 3)], ids=["chain", "tree"])
def test_exact_answers_are_as_surprising_as_the_targets_and_typical_ones_are_not(tree):
    p_values = [surprised(tree=tree, seed=seed).p_value for seed in range(8)]
    assert min(p_values) > 1e-3
    assert max(p_values) > 0.3
    lossy = surprised(verification="typical", tree=tree)
    assert lossy.passed is False
    assert lossy.surprise > 5
    assert lossy.p_value < 1e-6
    assert lossy.fault.startswith("decode.verification=typical is lossy by design: the log-prob")
    assert lossy.as_dict()["method"] == "surprise of sampled answers"


def test_typical_acceptance_passes_nowhere():
    greedy = surprised(verification="typical", temperature=0.0)
    assert greedy.passed is False
    assert greedy.fault == "decode.verification=typical is lossy by design"


def test_a_tree_passes_the_check_of_greedy_answers():
    found = check_proposers(
        table(0),
        {"draft": DraftModelProposer(table(1), tree=usual_tree(8, 3))},
        PROMPTS,
        max_new_tokens=12,
        gamma=3,
        batch_size=3,
        eos_token_ids=(),
    )["draft"]
    assert (found.passed, found.compared, found.mismatches) == (True, 8, 0)
