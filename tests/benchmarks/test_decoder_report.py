"""Benchmark tables fit 80 columns and say what the points say."""

import io

from rich.console import Console

from pipelines.benchmarks.decoder_report import LABELS, print_points

RATIO = {"median": 9.876, "ci95": [8.01, 9.99]}
POINT = {
    "method": "plain",
    "temperature": 0.0,
    "batch_size": 16,
    "compiled": True,
    "captured": False,
    "prompts": 96,
    "chunks": 6,
    "tokens_per_second": {"median": 12345.6, "quartiles": [11111.1, 13333.3]},
    "ratios": {"plain": RATIO, "hf_plain": RATIO},
}
DRAFTED = POINT | {
    "method": "speculative",
    "gamma": 4,
    "acceptance_length": {"mean": 3.456, "ci95": [3.21, 3.71], "n": 500, "prompts": 96},
    "cost_ratio": 0.123,
    "verify_ratio": 1.07,
    "overhead_ratio": 0.021,
    "speedup": {"measured": 1.58, "ci95": [1.5, 1.7], "predicted": 2.2},
    "full_length": 3.5,
    "prediction_error": -0.2818,
    "beside_hf": {"compared": 96, "identical": 90, "near_ties": 5, "different": 1},
}


def printed(points):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    print_points(points, console)
    return console.file.getvalue()


def test_the_tables_fit_eighty_columns_one_line_a_method():
    lines = printed([DRAFTED | {"method": name} for name in LABELS]).splitlines()
    assert max(map(len, lines)) <= 80
    for label in LABELS.values():
        row = next(line for line in lines if line.strip().startswith(f"{label}  "))
        assert "12346 [11111, 13333]" in row
        assert row.count("9.88 [8.01, 9.99]") == 2


def test_every_setting_has_its_table_with_prediction_and_answers_below():
    alone = DRAFTED | {"batch_size": 1, "temperature": 1.0, "compiled": False}
    text = " ".join(printed([POINT, DRAFTED, alone]).split())
    for part in (
        "greedy, batch 16, compiled: 96 prompts in 6 chunks",
        "tau 3.46 [3.21, 3.71], c 0.123, v 1.07, o 0.021",
        "rounds alone of full batches, tau 3.50: predicted 2.20, measured 1.58 (-28.2%)",
        "speculative = HF plain: 90 of 96 answers, 5 near-ties, 1 different",
        "temperature 1, batch 1, eager",
        "rounds alone: predicted 2.20",  # a row of its own is a full batch to its end
    ):
        assert part in text, part
    assert text.count("tokens/s") == 2
