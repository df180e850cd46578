"""Tables fit 80 columns and say what the summary says."""

import io

import pytest
import torch
from rich.console import Console

from draftkit.config import SamplingConfig
from draftkit.evaluation.engines import OWN, SETTINGS
from draftkit.evaluation.lossless import NOT_CHECKED, Losslessness
from draftkit.evaluation.report import (
    engine_table,
    evaluation_table,
    numbers_table,
    result_lines,
    ways_table,
)


def estimate(mean):
    counts = {"n": 6144, "prompts": 96, "documents": 28}
    return {"mean": mean, "ci95": [mean - 0.0123, mean + 0.0123], **counts}


def summary(alpha):
    whole = {"mean": 1.59, "ci95": [1.52, 1.66], "chunks": 24}
    return {
        "alpha": estimate(alpha),
        "alpha_greedy_draft": estimate(alpha - 0.2),
        "alpha_exact_match": estimate(alpha - 0.4),
        "acceptance_length": estimate(3.456),
        "acceptance_rate": estimate(0.614),
        "proposer": "sampled",
        "machine": "a CPU, 2 cores",
        "gamma": 4,
        "temperature": 1.0,
        "sampling": vars(SamplingConfig(top_k=20, top_p=0.95)),
        "batch_size": 1,
        "cost_ratio": 0.181,
        "verify_ratio": 1.07,
        "overhead_ratio": 0.12,
        "speedup": {"measured": 1.712, "ci95": [1.65, 1.78], "predicted": 1.69}
        | {"ceiling": 2.6, "prediction_error": 0.013, "end_to_end": whole}
        | {"predicted_by_gamma": [1.0, 1.2, 1.4, 1.6, 1.7, 1.71]},
        "best_gamma": 5,
        "tokens_per_second": {"autoregressive": 1130.4, "speculative": 1935.2},
        "lossless": Losslessness(32, 2, 2).as_dict(),
        "verdict": "deploy",
        "reason": "end-to-end speedup 1.59 [1.52, 1.66] lies above 1",
        "engines": [
            {"engine": one.engine, "setting": one.name, "mode": one.mode, "gamma": 20}
            | {
                "acceptance": estimate(alpha),
                "acceptance_length": estimate(13.456),
            }
            for one in (OWN["alpha"], *SETTINGS)
        ],
    }


def timed_way(mean, gamma=4):
    """What evaluation says of a way that was timed."""
    whole = {"mean": mean, "ci95": [mean - 0.05, mean + 0.05], "chunks": 24}
    rates = {"tokens_per_second": 62.0, "tokens_per_second_end_to_end": 50.0 * mean}
    rates["plain_tokens_per_second_end_to_end"] = 50.0
    return {
        "gamma": gamma,
        "acceptance_length": estimate(1.234),
        "speedup": {"measured": mean, "ci95": [mean, mean], "end_to_end": whole},
        **rates,
    }


def printed(table):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue()


@pytest.fixture
def pair():
    return summary(0.789) | {
        "before": summary(0.654),
        **{
            f"{k}_gain": estimate(0.135)
            for k in ("alpha", "alpha_greedy_draft", "acceptance_length")
        },
    }


def test_the_table_fits_eighty_columns_and_names_verdict_gain_and_both_drafts(pair):
    text = printed(evaluation_table(pair))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if line.startswith("argmax drafts, p(argmax q)"))
    assert "0.454 [0.442, 0.466]" in row
    for part in ("before", "after", "DEPLOY", "+0.135 [+0.123, +0.147]", "1.71 [1.65, 1.78]"):
        assert part in text
    assert text.count("1.59 [1.52, 1.66]") == 3  # of both drafts, and in the reason


def test_six_lines_say_what_changed(pair):
    lines = printed(result_lines(pair)).splitlines()
    assert max(map(len, lines)) <= 80
    head, *rows = (" ".join(line.split()) for line in lines)
    assert head == "before after gain"
    assert rows == [
        "alpha, sampled drafts 0.654 0.789 [0.777, 0.801] +0.135 [+0.123, +0.147]",
        "alpha, argmax drafts 0.454 0.589 [0.577, 0.601] +0.135 [+0.123, +0.147]",
        "tokens a target pass 3.456 3.456 [3.444, 3.468] +0.135 [+0.123, +0.147]",
        "speed-up, end to end 1.590 1.590 [1.520, 1.660]",
        "DEPLOY (draftkit's decoder, sampled drafts, batch 1, a CPU, 2 cores):",
        "end-to-end speedup 1.59 [1.52, 1.66] lies above 1",
    ]


def test_without_intervals_the_table_says_why_and_stands(pair):
    def bare(number):
        return number | {"ci95": None, "documents": 6}

    for one in (pair, pair["before"]):
        for key in ("alpha", "alpha_greedy_draft", "alpha_exact_match", "acceptance_length"):
            one[key] = bare(one[key])
        one["speedup"] |= {"ci95": None, "end_to_end": bare(one["speedup"]["end_to_end"])}
    pair |= {"alpha_gain": bare(pair["alpha_gain"])}
    text = printed(evaluation_table(pair))
    assert max(map(len, text.splitlines())) <= 80
    assert "no intervals: 6 documents, 20 needed" in " ".join(text.split())
    (alpha,) = (line for line in text.splitlines() if line.startswith("alpha = "))
    assert [part.strip() for part in alpha.split("│")][1:] == ["0.654", "0.789"]
    assert "0.789" in printed(result_lines(pair))


def test_a_gap_between_theory_and_clock_is_pointed_out(pair):
    assert "off predicted" not in printed(evaluation_table(pair))
    pair["speedup"]["prediction_error"] = -0.31
    assert "-31% off predicted" in " ".join(printed(evaluation_table(pair)).split())
    pair["speedup"]["end_to_end"]["ci95"] = None  # of too few to decide, it says nothing
    assert "off predicted" not in printed(evaluation_table(pair))


def test_each_engine_is_named_once_above_its_settings_in_eighty_columns():
    text = printed(engine_table(summary(0.6)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    assert text.count(" │ ") == 4 * (1 + len(SETTINGS))
    assert text.count("vLLM") == text.count("\ntransformers") == 1
    assert " ".join(lines[3].split()) == ("draftkit │ sampled │ 20 │ 0.600 │ 13.46 [13.44, 13.47]")


def shown_rows(table):
    lines = printed(table).splitlines()
    assert max(map(len, lines)) <= 80
    return [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]


def test_all_ways_stand_in_one_table_the_fastest_first_at_every_temperature():
    ways = {
        "prompt_lookup": timed_way(1.44, 7),
        "drafter": timed_way(1.08, 1),
        "hybrid": timed_way(1.62, 12) | {"draft_gamma": 3, "lookup_min": 1},
        "before": timed_way(0.61),
    }
    greedy = {**ways, "drafter": timed_way(1.7), "hybrid": timed_way(1.69)}
    warm, cold = {"ways": ways, "best_of": "hybrid"}, {"ways": greedy, "best_of": "none"}
    table = ways_table({"by_temperature": {"0.2": warm, "0": cold}})
    rows = shown_rows(table)
    shown = ["0.2", "drafter + prompt lookup *", "81.0", "1.62 [1.57, 1.67]", "1.23", "12, 3"]
    assert rows[0] == shown
    settings = "hybrid, T = 0.2: decode.gamma=12 decode.draft_gamma=3 decode.lookup_min=1"
    assert settings in printed(table)
    names = ["drafter + prompt lookup *", "prompt lookup", "drafter", "plain", "drafter before"]
    assert [row[1] for row in rows[:5]] == names
    assert rows[3][2:] == ["50.0", "1", "1", "0"]
    assert rows[5][:2] == ["0", "drafter"]
    assert len(rows) == 10


def test_the_numbers_of_proposals_stand_side_by_side_with_the_best_marked():
    numbers = [str(number) for number in range(1, 13)]
    by_number = {
        "speedup_by_k": {n: 2.0 - abs(int(n) - 9) / 10 for n in numbers},
        "acceptance_length_by_k": {n: estimate(12.345) for n in numbers},
        "alpha_by_position": [0.43] * 12,
        "alpha_given_chain": [0.5] * 11 + [None],
    }
    lines = printed(numbers_table(by_number)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["K", *numbers[:8], "9*", *numbers[9:]]
    rows = {" ".join(line.split()[:-12]): line.split()[-12:] for line in lines[2:]}
    assert rows["tau"] == ["12.3"] * 12
    assert rows["alpha at K"] == ["0.43"] * 12
    assert rows["after K - 1"] == ["0.50"] * 11 + ["-"]
    assert rows["speed-up"][8] == "2.00"


def test_engines_are_said_not_to_know_the_ids_that_a_drafter_keeps_to():
    assert "kept_ids" not in printed(engine_table(summary(0.6)))
    text = " ".join(printed(engine_table(summary(0.6) | {"kept_ids": 4096})).split())
    assert "proposes 4,096 ids alone (kept_ids.json), which only draftkit knows" in text


@pytest.mark.parametrize(
    ("lossless", "row"),
    [
        (Losslessness(32, 2, 2), ["lossless, greedy float32", "yes, 30 of 32 (2 ties)"]),
        (
            Losslessness(32, 2, 1, torch.bfloat16),
            ["lossless, greedy bfloat16", "NO, 30 of 32 (1 ties)"],
        ),
        (NOT_CHECKED, ["lossless, greedy", "not checked"]),
    ],
)
def test_the_check_is_shown_with_its_dtype(lossless, row):
    text = printed(evaluation_table(summary(0.6) | {"lossless": lossless.as_dict()}))
    (line,) = (line for line in text.splitlines() if line.startswith("lossless"))
    assert [cell.strip() for cell in line.split("│")] == row


def test_a_rate_without_proposals_is_a_dash(pair):
    pair["acceptance_rate"] = None
    (line,) = (x for x in printed(evaluation_table(pair)).splitlines() if "accepted /" in x)
    assert line.split()[-1] == "-"
