"""A judgement puts measured parts together under the keys that other tools read."""

import re
from dataclasses import replace

import pytest
import torch

from draftkit.config import (
    PROPOSER_NAMES,
    Config,
    DecodeConfig,
    DraftConfig,
    EvaluateConfig,
    HardwareConfig,
    SamplingConfig,
    TargetConfig,
)
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import PROPOSERS, proposer_of
from draftkit.decoding.generation import Completion
from draftkit.evaluation import measure, walltime
from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.lossless import Losslessness
from draftkit.evaluation.measure import (
    Measured,
    Prompts,
    check_lossless,
    float32_bytes,
    gather,
    timed_rows,
    ways_of,
)
from draftkit.evaluation.summary import compare, count_rounds, summarise
from draftkit.evaluation.walltime import PLAIN, Chunk, Timed
from draftkit.models.loading import load_draft, load_target, save_model
from draftkit.theory.speedup import Costs, best_gamma, factors
from tests import tiny
from tests.tabular import random_adapter, relative

CONFIG = Config(decode=DecodeConfig(gamma=2), evaluate=EvaluateConfig())
SERVED = SamplingConfig()


def completion(counts, tested, total):
    drafted = 2 * sum(counts)
    return Completion(
        *([1], [2] * 12),
        **{"accept_counts": counts, "drafted": drafted, "tested": tested},
        acceptance_total=total,
    )


def lookup(seconds=3.0, drafted=1):
    """What prompt lookup did, with proposals in `drafted` of the twelve rounds of a prompt."""
    one = Completion([1], [2] * 12, accept_counts=[12, 0, 0], drafted=drafted, tested=drafted)
    return Timed([Chunk(0.05, seconds, [one])] * 20, gamma=2)


def measured(alpha=0.75, seconds=2.0, prefill=0.1, looked_up=3.0, correct=True, pairs=10):
    timed = [
        Chunk(prefill, seconds, [answer])
        for answer in (completion([1, 2, 3], 11, 8.0), completion([2, 2, 2], 10, 6.0))
        * pairs  # of documents, by default enough for intervals
    ]
    plain = Chunk(0.05, 4.0, [completion([12], 0, 0.0)])
    column = torch.tensor([10.0, 20.0] * 10, dtype=torch.float64)
    totals = {
        "alpha": alpha * column,
        "alpha_greedy_draft": 0.5 * column,
        "alpha_exact_match": 0.25 * column,
    }
    # Alike at every token, so that tau is that of the i.i.d. model.
    shares = {mode: [*(sums / column)[:, None].expand(-1, 3)] for mode, sums in totals.items()}
    return Measured(
        {"given": PromptTotals(totals, column, shares)},
        {
            PLAIN: Timed([plain] * 2 * pairs),
            "prompt_lookup": lookup(looked_up),
            "given": Timed(timed, gamma=2),
        },
        {"given": Costs(0.01, 0.2, 1.1, 0.1, {1: 1.05, 2: 1.1, 4: 1.2, 8: 1.4})},
        {"given": Losslessness(4, 0 if correct else 1, 0)},
    )


def both(before, after):
    """What was measured of each of the two, as of a drafter and the one before it."""
    parts = {"before": before, "after": after}
    names = ("scored", "timed", "costs", "lossless")
    own = {key: {n: getattr(one, key)["given"] for n, one in parts.items()} for key in names}
    return Measured(**own | {"timed": after.timed | own["timed"]})


def test_counts_follow_from_the_histogram_of_all_rounds():
    counted = count_rounds(measured().timed["given"])
    assert counted["accept_counts"] == [30, 40, 50]
    assert counted["acceptance_length"]["mean"] == pytest.approx(1 + 14 / 12)
    assert counted["acceptance_length"]["n"] == 120
    assert counted["acceptance_rate"]["mean"] == pytest.approx(14 / 24)
    assert counted["acceptance_per_position"] == pytest.approx([9 / 12, 5 / 12])
    assert counted["alpha_decoding"]["mean"] == pytest.approx(14 / 21)


def test_the_prediction_uses_tau_and_calibrated_costs_alone():
    summary = summarise(measured(), "given", SERVED, CONFIG)
    tau = 1 + 14 / 12
    assert summary["speedup"]["predicted"] == pytest.approx(tau / (2 * 0.2 + 1.1 + 0.1))
    assert summary["speedup"]["ceiling"] == pytest.approx(3 / 1.6)
    assert summary["speedup"]["measured"] == pytest.approx(2.0)
    slower = summarise(measured(seconds=8.0), "given", SERVED, CONFIG)
    assert slower["speedup"]["predicted"] == summary["speedup"]["predicted"]
    assert slower["speedup"]["measured"] == pytest.approx(0.5)
    assert slower["speedup"]["prediction_error"] == pytest.approx(0.5 / (tau / 1.6) - 1)


@pytest.mark.parametrize(
    ("proposer", "verification", "mode"),
    [
        ("sampled", "speculative", "alpha"),
        ("sampled", "block", "alpha"),
        ("sampled", "match", "alpha_exact_match"),
        ("argmax", "match", "alpha_greedy_draft"),
    ],
)
def test_best_gamma_curve_and_own_row_are_of_what_the_rule_accepts(proposer, verification, mode):
    decode = DecodeConfig(gamma=2, proposer=proposer, verification=verification)
    judged = measured()
    summary = compare(judged, "given", SERVED, replace(CONFIG, decode=decode))
    acceptance = {"alpha": 0.75, "alpha_greedy_draft": 0.5, "alpha_exact_match": 0.25}[mode]
    expected = factors(acceptance, judged.costs["given"], 12)
    assert summary["speedup"]["predicted_by_gamma"] == pytest.approx(expected)
    assert summary["best_gamma"] == summary["best_gamma_by_mode"][mode]
    own = summary["engines"][0]
    assert (own["engine"], own["mode"]) == ("draftkit", mode)


def test_verdict_and_break_even_follow():
    fast = summarise(measured(), "given", SERVED, CONFIG)
    slow = summarise(measured(seconds=8.0), "given", SERVED, CONFIG)
    assert (fast["verdict"], slow["verdict"]) == ("deploy", "do_not_deploy")
    alpha = fast["break_even_alpha"]
    assert 1 + alpha + alpha**2 == pytest.approx(1.6)
    assert fast["best_gamma"] > 0
    assert fast["tokens_per_second"] == {"autoregressive": 3.0, "speculative": 6.0}


def test_rows_of_a_batch_that_is_timed_are_of_different_documents():
    """Else batches would share documents, and tell the same twice."""
    texts = [[number] for number in range(8)]
    prompts = Prompts(texts, [], documents=[*"abcabcab"])
    for size, rows in ((1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2])):
        options = EvaluateConfig(timing_prompts=6, timing_batch_size=size)
        assert timed_rows(prompts, options) == rows


def test_a_draft_whose_prefill_costs_more_than_its_rounds_save_is_not_deployed():
    """A chunk takes 4.05 s without it; 2 s of rounds with it, and 2.5 s or 0.5 s of prefill."""
    slow, fast = (measured(prefill=seconds) for seconds in (2.5, 0.5))
    for judged, decision, speedup in (
        (slow, "do_not_deploy", 4.05 / 4.5),
        (fast, "deploy", 4.05 / 2.5),
    ):
        summary = summarise(judged, "given", SERVED, CONFIG)
        assert summary["verdict"] == decision
        assert summary["speedup"]["measured"] == pytest.approx(2.0)
        assert summary["speedup"]["end_to_end"]["mean"] == pytest.approx(speedup)
        assert summary["speedup"]["end_to_end"]["ci95"] == pytest.approx([speedup, speedup])
        assert summary["speedup"]["end_to_end"]["chunks"] == 20
        assert summary["reason"].startswith(f"end-to-end speedup {speedup:.2f}")


def test_before_and_after_stand_side_by_side_with_a_paired_gain():
    pair = both(measured(alpha=0.5), measured(alpha=0.75))
    summary = compare(pair, "after", SERVED, CONFIG)
    assert summary["alpha"]["mean"] == pytest.approx(0.75)
    assert summary["before"]["alpha"]["mean"] == pytest.approx(0.5)
    # the same shift in every prompt leaves a paired interval of no width
    assert summary["alpha_gain"]["ci95"] == pytest.approx([0.25, 0.25])
    assert "before" not in compare(measured(), "given", SERVED, CONFIG)


def test_the_drafter_is_held_against_what_there_was_before_and_against_prompt_lookup():
    made = both(measured(seconds=4.0), measured(seconds=2.0))
    over = compare(made, "after", SERVED, CONFIG)["speedup_over"]
    assert over["before"]["mean"] == pytest.approx(4.1 / 2.1)
    assert over["prompt_lookup"]["mean"] == pytest.approx(3.05 / 2.1)
    assert over["before"]["ci95"] == pytest.approx([4.1 / 2.1] * 2)


@pytest.mark.parametrize(
    ("before", "after", "best"),
    [
        ({}, {}, "drafter"),
        ({"seconds": 1.0}, {}, "before"),
        ({}, {"looked_up": 1.0}, "prompt_lookup"),
        ({"seconds": 5.0}, {"seconds": 6.0, "looked_up": 7.0}, "none"),
        ({"seconds": 5.0}, {"looked_up": 3.0, "correct": False}, "prompt_lookup"),
    ],
)
def test_the_best_way_is_the_fastest_that_is_lossless_and_pays(before, after, best):
    pair = both(measured(**{"seconds": 3.5, **before}), measured(**after))
    assert compare(pair, "after", SERVED, CONFIG)["best_of"] == best


def test_a_proposer_without_a_draft_goes_by_its_own_name():
    config = replace(CONFIG, decode=DecodeConfig(gamma=2, proposer="bigram"))
    pair = both(measured(), measured(looked_up=5.0))
    summary = compare(pair, "after", SERVED, config)
    assert summary["proposer"] == summary["best_of"] == "bigram"
    assert "best_gamma_by_mode" not in summary


def test_the_best_gamma_of_a_hybrid_is_that_of_what_it_accepted_at_first():
    config = replace(CONFIG, decode=DecodeConfig(gamma=2, proposer="hybrid"))
    found = measured(alpha=0.9)
    summary, costs = summarise(found, "given", SERVED, config), found.costs["given"]
    chosen = best_gamma(9 / 12, costs, 12)
    assert (summary["best_gamma"], summary["best_gamma_factor"]) == pytest.approx(chosen)


def test_rates_of_proposals_that_were_never_made_are_null():
    counted = count_rounds(lookup(drafted=0))
    assert counted["acceptance_rate"] is None
    assert counted["alpha_decoding"] is None
    assert counted["acceptance_length"]["mean"] == 1


@pytest.mark.parametrize("name", PROPOSER_NAMES)
def test_each_draft_is_judged_as_it_is_served(name):
    """A draft of its own for each; what needs none stands once, and looks at none."""
    target = random_adapter(8, 1)
    drafts = {"before": relative(target, 2), "after": relative(target, 3)}
    prompts = Prompts([[1, 2, 3]], [[1, 2], [3, 4]])
    config = replace(CONFIG, decode=DecodeConfig(gamma=2, proposer=name))
    ways = ways_of(target, drafts, prompts, config)
    found = {key: make() for key, make in ways.items() if key in drafts}
    if config.decode.has_drafter:
        tables = {key: one.weights()["table"].data_ptr() for key, one in found.items()}
        assert tables == {key: draft.table.data_ptr() for key, draft in drafts.items()}
    else:
        assert [*found] == ["after"]
        assert found["after"].weights() == {}
    expected = PROPOSERS[name](lambda: drafts["after"], lambda: [[1, 2], [3, 4]], target)
    assert found["after"].signature == expected.signature


def test_the_settings_of_a_hybrid_reach_it():
    decode = DecodeConfig(gamma=5, proposer="hybrid", draft_gamma=3, lookup_min=1)
    target = random_adapter(8, 1)
    made = proposer_of(replace(CONFIG, decode=decode), lambda: target, list, target)
    assert (made.drafts(5), made.guesser.min_ngram) == (3, 1)
    assert made.drafts(2) == 2  # never more than a guess has


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny pair on disk."""
    path = tmp_path_factory.mktemp("pair")
    target = tiny.model()
    save_model(target, tiny.byte_tokenizer(), path / "target")
    save_model(tiny.related(target), tiny.byte_tokenizer(), path / "draft")
    return path


def checked(folder, mode, dtype="bfloat16"):
    """The check by `evaluate.lossless=mode`, the target afterwards, and what was noted."""
    hardware = HardwareConfig(device="cpu", dtype=dtype)
    target = load_target(TargetConfig(path=str(folder / "target")), hardware)
    options = EvaluateConfig(lossless=mode, max_new_tokens=8)
    prompts = Prompts(test=tiny.prompts([5] * 6), calibration=[])
    drafts, lines = {"draft": DraftConfig(path=str(folder / "draft"))}, []
    result = check_lossless(target, drafts, prompts, Config(evaluate=options), lines.append)
    (line,) = lines
    return result["draft"], target, line


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("auto", "greedy identity in float32"),
        ("float32", "greedy identity in float32"),
        ("served", "greedy identity in bfloat16"),
        ("off", "not checked"),
    ],
)
def test_the_identity_check_runs_in_the_dtype_that_was_chosen(folder, mode, method):
    lossless, target, line = checked(folder, mode)
    assert lossless.as_dict()["method"] == method
    assert lossless.passed is (None if mode == "off" else True)
    assert lossless.compared == (0 if mode == "off" else 6)
    assert line.startswith("losslessness: ")
    assert method.split()[-1] in line
    assert target.adapter.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("proposer", "ways"),
    [
        ("sampled", {"prompt_lookup", "draft", "hybrid"}),
        ("argmax", {"prompt_lookup", "draft"}),
        ("bigram", {"prompt_lookup", "draft"}),
        ("prompt_lookup", {"draft"}),
    ],
)
def test_every_way_that_may_be_named_is_checked_itself(folder, proposer, ways):
    hardware = HardwareConfig(device="cpu", dtype="float32")
    target = load_target(TargetConfig(path=str(folder / "target")), hardware)
    config = Config(
        evaluate=EvaluateConfig(max_new_tokens=4), decode=DecodeConfig(proposer=proposer)
    )
    prompts = Prompts(test=tiny.prompts([5] * 2), calibration=tiny.prompts([5]))
    drafts = {"draft": DraftConfig(path=str(folder / "draft"))}
    found = check_lossless(target, drafts, prompts, config, lambda line: None)
    assert {name for name, one in found.items() if one.compared == 2 and one.passed} == ways


def test_a_way_carries_the_check_of_itself():
    """A hybrid that changes outputs is not named, however fast, though its drafter does not."""
    made = both(measured(seconds=4.0), measured(seconds=2.0))
    made = replace(
        made,
        timed=made.timed | {"hybrid": lookup(1.0)},
        lossless=made.lossless | {"hybrid": Losslessness(32, 3, 0)},
    )
    summary = compare(made, "after", SERVED, CONFIG)
    assert summary["ways"]["hybrid"]["lossless"]["statistic"] == 3
    assert "lossless" not in summary["ways"]["prompt_lookup"]  # which was not checked
    assert (summary["best_of"], summary["use"]) == ("drafter", "sampled")


def test_where_float32_does_not_fit_the_served_dtype_is_checked_and_both_sizes_are_said(
    folder, monkeypatch
):
    monkeypatch.setattr("draftkit.evaluation.measure.free_bytes", lambda device: 1000)
    lossless, _, line = checked(folder, "auto")
    assert lossless.dtype == torch.bfloat16
    assert re.search(r"in bfloat16, as float32 takes \d+\.\d GB more and 0\.0 GB are free$", line)
    assert checked(folder, "float32")[0].dtype == torch.float32
    served, _, line = checked(folder, "auto", "float32")
    assert served.dtype == torch.float32  # which the models are in anyway
    assert line.endswith("in float32")


def test_what_the_check_in_float32_takes_is_known_from_shapes(folder):
    hardware = HardwareConfig(device="cpu", dtype="bfloat16")
    target = load_target(TargetConfig(path=str(folder / "target")), hardware)
    drafts = {"draft": DraftConfig(path=str(folder / "draft"))}
    count = sum(weight.numel() for weight in target.adapter.model.parameters())
    assert 8 * count < float32_bytes(target, drafts) < 1.3 * 8 * count  # target and drafter


def gathered(folder, decode, *, note=lambda line: None, **evaluate):
    """All that is measured of a draft that stands for the one before it too."""
    target = load_target(TargetConfig(path=str(folder / "target")), HardwareConfig(device="cpu"))
    draft = load_draft(DraftConfig(path=str(folder / "draft")), target)
    who = {"sampler": "target", "sampler_version": "", "sampling": {}, "seed": 0}
    texts = [
        Record(prompt_ids=prompt, output_ids=[1, 2, 3], row=row, **who)
        for row, prompt in enumerate(tiny.prompts([5, 6]))
    ]
    return gather(
        target,
        {"before": draft, "after": draft},
        contexts=texts,
        others=texts,
        prompts=Prompts(tiny.prompts([5, 6]), tiny.prompts([4])),
        sampling=SERVED,
        lossless=dict.fromkeys(("before", "after"), Losslessness(1, 0, 0)),
        config=Config(decode=decode, evaluate=EvaluateConfig(max_new_tokens=4, **evaluate)),
        note=note,
    )


def test_costs_are_measured_on_the_decoders_that_are_timed(folder, monkeypatch):
    """Two decoders of one model need not be as fast: of each draft its own, and one plain one."""
    calibrated, timed = list[int](), list[tuple[int, int]]()
    real_calibrate, real_batch = measure.calibrate, walltime.timed_batch

    def calibrate(plain, drafted, *arguments, **options):
        calibrated.extend([id(plain), id(drafted)])
        return real_calibrate(plain, drafted, *arguments, **options)

    def timed_batch(decoder, *arguments, gamma, **options):
        timed.append((id(decoder), gamma))
        return real_batch(decoder, *arguments, gamma=gamma, **options)

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr("draftkit.evaluation.costs.ROUNDS", 2)
    monkeypatch.setattr(walltime, "timed_batch", timed_batch)
    found = gathered(folder, DecodeConfig(gamma=2, compile="false"))
    plain, before, again, after = calibrated
    assert plain == again
    assert len({plain, before, after}) == 3
    ways = {"before", "after", "prompt_lookup", "hybrid"}
    assert {name: one.gamma for name, one in found.timed.items()} == {PLAIN: 0} | dict.fromkeys(
        ways, 2
    )
    assert {*timed} > {(plain, 0), (before, 2), (after, 2)}
    assert len({decoder for decoder, _ in timed}) == 5  # prompt lookup and the hybrid beside them


@pytest.mark.parametrize(
    ("gamma", "rows", "packed", "guesses"),
    [
        (2, 1, True, []),
        ("auto", 1, False, [12]),
        ("auto", 1, True, [3, 12]),  # four tokens are the best pass of packed weights
        ("auto", 2, True, []),
    ],
)
def test_where_numbers_are_chosen_guesses_tell_what_passes_cost_that_no_draft_runs(
    folder, monkeypatch, gamma, rows, packed, guesses
):
    """For each of two drafts, where rows are decoded alone."""
    noted = list[str]()
    monkeypatch.setattr("draftkit.evaluation.costs.ROUNDS", 2)
    monkeypatch.setattr(measure, "is_packed", lambda model: packed)
    decode = DecodeConfig(gamma=gamma, compile="false")
    gathered(folder, decode, note=noted.append, timing_batch_size=rows)
    for count in (3, 12):
        times = noted.count(f"first rounds of {count} proposals")
        assert times == 2 * (count in guesses)


@pytest.mark.parametrize("of_both", [True, False])
def test_what_is_chosen_for_a_hybrid_is_timed_and_stated(folder, monkeypatch, of_both):
    both = {"draft_gamma": 2, "lookup_min": 1} if of_both else {}
    chosen = {key: {"gamma": 3} for key in ("before", "after", "prompt_lookup")}
    chosen["hybrid"] = {"gamma": 5, **both}
    monkeypatch.setattr(measure, "chosen_numbers", lambda *_: chosen)
    monkeypatch.setattr("draftkit.evaluation.costs.ROUNDS", 2)
    timed = gathered(folder, DecodeConfig(gamma="auto", compile="false")).timed["hybrid"]
    assert timed.gamma == 5
    assert timed.hybrid == (both or {"draft_gamma": 5, "lookup_min": 2})


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_hybrid_that_is_judged_itself_has_one_number(folder, monkeypatch, batch_size):
    monkeypatch.setattr("draftkit.evaluation.costs.ROUNDS", 2)
    decode = DecodeConfig(gamma="auto", proposer="hybrid", compile="false")
    timed = gathered(folder, decode, timing_batch_size=batch_size).timed["after"]
    assert timed.hybrid == {"draft_gamma": timed.gamma, "lookup_min": 2}
