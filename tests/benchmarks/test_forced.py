"""Acceptance that is given is given exactly, to our decoder and to Hugging Face's."""

import inspect
import math
from dataclasses import replace

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import graphs
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.walltime import Setting
from draftkit.theory.noise import sample
from draftkit.theory.verification import VERIFIERS, residual
from pipelines.benchmarks.decoder_peers import hugging_face
from pipelines.benchmarks.forced import GIVEN, GivenAcceptance, acceptance_given, assistance_given
from tests import tiny

CPU = torch.device("cpu")
GAMMA, NEW = 4, 20
STANDARD = 4.5  # standard errors that a share may lie off


@pytest.fixture(scope="module")
def pair():
    return tiny.pair()


def laws(rows, places, size, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, places, size, generator=generator, dtype=torch.float64) + 0.01
    return probs / probs.sum(-1, keepdim=True)


def test_a_proposal_passes_where_its_number_lies_below_the_rate_whatever_both_laws_are():
    rows, size = 64, 7
    target, draft = laws(rows, GAMMA + 1, size, 0), laws(rows, GAMMA, size, 1)
    tokens = torch.randint(size, (rows, GAMMA), generator=torch.Generator().manual_seed(2))
    accept, last = torch.rand(rows, GAMMA, dtype=torch.float64), torch.rand(rows)
    lengths = torch.arange(rows) % (GAMMA + 1)
    verifier = GivenAcceptance(CPU)
    for rate in (0.0, 0.5, 0.8, 1.0):
        verifier.rate.fill_(rate)
        verdict = verifier(
            target_probs=target,
            draft_probs=draft,
            draft_tokens=tokens,
            lengths=lengths,
            accept_uniform=accept,
            next_uniform=last,
        )
        for row in range(rows):
            passed = (accept[row, : lengths[row]] < rate).tolist()
            accepted = passed.index(False) if False in passed else len(passed)
            assert int(verdict.accepted[row]) == accepted
            rejected = accepted < lengths[row]
            q = draft[row, accepted] if rejected else torch.zeros(size, dtype=torch.float64)
            law = residual(target_probs=target[row, accepted], draft_probs=q)
            assert verdict.next_token[row] == sample(probs=law[None], uniform=last[row : row + 1])


def test_rounds_accept_as_many_as_the_rate_has_it(pair):
    """Each round tests proposals until one fails: the share of passed tests is the rate."""
    (target, draft), rate, rows = pair, 0.8, 48
    requests = make_requests(
        tiny.prompts([5] * rows), max_new_tokens=20, sampling=SamplingConfig(), gamma=GAMMA
    )
    with acceptance_given(GivenAcceptance(CPU), rate) as verification:
        answers = decode(
            target,
            list(requests),
            eos_token_ids=(),
            batch_size=rows,
            proposer=DraftModelProposer(draft),
            verification=verification,
        )
    passed = sum(answer.accepted for answer in answers)
    tested = sum(answer.tested for answer in answers)
    assert tested > 400
    assert abs(passed / tested - rate) < STANDARD * math.sqrt(rate * (1 - rate) / tested)


def test_one_piece_of_code_serves_all_rates():
    """Compiled code reads the rate where it lies, and keeps no value of it."""
    verifier = GivenAcceptance(CPU)
    assert isinstance(verifier.rate, torch.Tensor)
    place = verifier.rate.data_ptr()
    for rate in (0.3, 0.9):
        with acceptance_given(verifier, rate):
            assert (verifier.rate.data_ptr(), float(verifier.rate)) == (place, rate)


def test_the_exact_rules_are_what_they_were_afterwards():
    before = dict(VERIFIERS)
    with acceptance_given(GivenAcceptance(CPU), 0.5) as name:
        assert name == GIVEN
        assert {**before, GIVEN: VERIFIERS[GIVEN]} == VERIFIERS
    assert before == VERIFIERS
    with pytest.raises(RuntimeError), acceptance_given(GivenAcceptance(CPU), 0.5):
        raise RuntimeError
    assert before == VERIFIERS


def test_assisted_generation_accepts_at_the_rate_and_draws_as_before_afterwards(pair):
    from transformers.generation import utils

    rule, draw = utils._speculative_sampling, torch.rand_like
    older = "is_done_candidate" in inspect.signature(rule).parameters
    more = {"is_done_candidate": False} if older else {}
    ratios = torch.full((1, GAMMA), 0.01)
    logits = torch.randn(1, GAMMA + 1, 9)
    ids, passed, tested = torch.zeros(1, 6, dtype=torch.long), 0, 0
    with assistance_given(0.8):
        for _ in range(300):
            _, count = utils._speculative_sampling(ids, logits[:, 1:], GAMMA, logits, **more)
            passed, tested = passed + int(count), tested + min(int(count) + 1, GAMMA)
        assert torch.rand_like(ratios).max() < 1
    assert abs(passed / tested - 0.8) < STANDARD * math.sqrt(0.16 / tested)
    assert utils._speculative_sampling is rule
    assert torch.rand_like is draw


def test_assistance_given_reaches_generate(pair):
    target, draft = pair
    setting = Setting(
        sampling=SamplingConfig(),
        max_new_tokens=NEW,
        gamma=GAMMA,
        verification=GIVEN,
        batch_size=1,
        capacity=80,
        eos_token_ids=(),
        seed=0,
        compiled=False,
    )
    passes = []
    forward = target.model.forward

    def counted(*arguments, **options):
        passes[-1] += 1
        return forward(*arguments, **options)

    peer = hugging_face(target, setting, pad_token_id=0, assistant=draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.model, "forward", counted)
        for rate in (0.0, 1.0):
            passes.append(0)
            with acceptance_given(GivenAcceptance(CPU), rate, assisted=True):
                peer(tiny.prompts([5]), 0)
    assert passes == [NEW, math.ceil(NEW / (GAMMA + 1))]


def test_captured_decoders_are_asked_for_by_the_setting(monkeypatch):
    from draftkit.evaluation import walltime

    asked = []
    monkeypatch.setattr(walltime, "Decoder", lambda *a, **options: asked.append(options))
    setting = Setting(max_new_tokens=8, gamma=2, batch_size=8, capacity=80)
    for captured in (False, True):
        walltime.make_decoder(object(), None, replace(setting, captured=captured))
    assert [options["captured"] for options in asked] == [False, True]
    assert walltime.shapes(setting) == [8]
    wanted = sorted({graphs.batch_size(rows, 8) for rows in range(1, 9)})
    assert walltime.shapes(replace(setting, captured=True)) == wanted
