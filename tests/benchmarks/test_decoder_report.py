"""Benchmark tables fit 80 columns and say what the points say."""

import io

from rich.console import Console

from pipelines.benchmarks.decoder_points import METHODS
from pipelines.benchmarks.decoder_report import LABELS, LEGEND, benchmark_tables


def point(method, **more):
    ratio = {"median": 9.876, "ci95": [8.01, 9.99]}
    return {
        "method": method,
        "temperature": 0.0,
        "batch_size": 16,
        "gamma": 4,
        "compiled": True,
        "prompts": 96,
        "chunks": 6,
        "tokens_per_second": {"median": 12345.6, "quartiles": [11111.1, 13333.3]},
        "ratios": {"plain": ratio, "hf_plain": ratio},
    } | more


DRAFTED = {
    "acceptance_length": {"mean": 3.456, "ci95": [3.21, 3.71], "n": 500, "prompts": 96},
    "cost_ratio": 0.123,
    "verify_ratio": 1.07,
    "overhead_ratio": 0.021,
    "speedup": {
        "measured": 1.58,
        "ci95": [1.5, 1.7],
        "predicted": 2.2,
    },
    "full_length": 3.5,
    "prediction_error": -0.2818,
    "beside_hf": {"compared": 96, "identical": 90, "near_ties": 5, "different": 1},
}


def printed(points):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for table in benchmark_tables(points):
        console.print(table)
    console.print(LEGEND)
    return console.file.getvalue()


def test_the_tables_fit_eighty_columns_one_line_a_method():
    text = printed([point(name, **DRAFTED) for name in METHODS])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    for label in LABELS.values():
        row = next(line for line in lines if line.strip().startswith(f"{label}  "))
        assert "12346 [11111, 13333]" in row
        assert row.count("9.88 [8.01, 9.99]") == 2


def test_prediction_and_answers_stand_below():
    text = " ".join(printed([point("plain"), point("speculative", **DRAFTED)]).split())
    for part in (
        "greedy, batch 16, compiled: 96 prompts in 6 chunks",
        "tau 3.46 [3.21, 3.71], c 0.123, v 1.07, o 0.021",
        "rounds alone of full batches, tau 3.50: predicted 2.20, measured 1.58 (-28.2%)",
        "speculative = HF plain: 90 of 96 answers, 5 near-ties, 1 different",
    ):
        assert part in text, part


def test_a_single_row_is_a_full_batch_and_a_baseline_has_no_ratio_to_itself():
    alone = point("speculative", **DRAFTED) | {"batch_size": 1}
    plain = point("plain") | {"batch_size": 1, "ratios": {}}
    text = printed([plain, alone])
    assert "rounds alone: predicted 2.20, measured 1.58" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("plain"))
    assert "[8.01" not in row


def test_every_setting_gets_a_table_and_chosen_gammas_their_shares():
    points = [point("plain"), point("adaptive", gammas={"0": 30, "4": 10})]
    text = printed([*points, point("plain", temperature=1.0, compiled=False)])
    assert "adaptive gamma: 0 in 75%, 4 in 25% of rounds" in " ".join(text.split())
    assert "temperature 1, batch 16, eager" in text
    assert text.count("tokens/s") == 2


def test_every_method_has_a_label():
    assert set(LABELS) == set(METHODS)
