"""What people see: the table that ends a run, and the curves of a training.

Renders summaries; computes nothing. Tables fit 80 columns. Every rate stands beside its
definition.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftkit.artifacts import atomic_path

MODE_ROWS = (
    ("alpha", "alpha = sum min(p, q)"),
    ("alpha_greedy_draft", "greedy draft, p(argmax q)"),
    ("alpha_exact_match", "exact match, sum p q"),
)
COUNT_ROWS = (
    ("acceptance_length", "tau, tokens a target pass"),
    ("acceptance_rate", "accepted / drafted"),
)
PREDICTION_TOLERANCE = 0.1
VERDICTS = {"deploy": "DEPLOY", "do_not_deploy": "DO NOT DEPLOY", "inconclusive": "INCONCLUSIVE"}


def interval(estimate: dict[str, Any], digits: int = 3) -> str:
    """`0.812 [0.801, 0.823]`."""
    low, high = estimate["ci95"]
    return f"{estimate['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def speedup_text(summary: dict[str, Any]) -> str:
    """The measured speed-up of the rounds with its interval."""
    speedup = summary["speedup"]
    return interval({"mean": speedup["measured"], "ci95": speedup["ci95"]}, 2)


def evaluation_table(summary: dict[str, Any]) -> Table:
    """One column a draft (before and after, where there are two), verdict and reason below."""
    before = summary.get("before")
    columns = [summary] if before is None else [before, summary]
    proposer = summary.get("proposer", "sampled")
    proposer = "" if proposer == "sampled" else f"proposer {proposer}, "
    title = (
        f"{proposer}temperature {summary['temperature']:g}, gamma {summary['gamma']}, "
        f"batch {summary['batch_size']}, {summary['alpha']['prompts']} held-out prompts, "
        "95 % intervals"
    )
    table = Table(title=title, caption=caption(summary), show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ["draft"] if before is None else ["before", "after"]:
        table.add_column(name, justify="right", no_wrap=True)

    def row(label: str, *texts: str) -> None:
        table.add_row(label, *texts)

    for key, label in MODE_ROWS:
        row(label, *(interval(column[key]) for column in columns))
        if f"{key}_gain" in summary:
            row("  paired gain", "", signed(summary[f"{key}_gain"]))
    for key, label in COUNT_ROWS:
        row(label, *("-" if c[key] is None else interval(c[key], 2) for c in columns))
    row("c = draft / target step", *(f"{column['cost_ratio']:.3f}" for column in columns))
    row(
        "v, o = verify, rest / step",
        *(f"{c['verify_ratio']:.2f}, {c['overhead_ratio']:.2f}" for c in columns),
    )
    row("speedup measured", *map(speedup_text, columns))
    row("speedup predicted", *(f"{column['speedup']['predicted']:.2f}" for column in columns))
    row("ceiling at alpha = 1", *(f"{column['speedup']['ceiling']:.2f}" for column in columns))
    row("speedup end to end", *(interval(c["speedup"]["end_to_end"], 2) for c in columns))
    row("best gamma", *(str(column["best_gamma"]) for column in columns))
    for key, label in (("autoregressive", "tokens/s plain"), ("speculative", "tokens/s drafted")):
        row(label, *(f"{column['tokens_per_second'][key]:.0f}" for column in columns))
    row("lossless, greedy float32", *(lossless_text(column["lossless"]) for column in columns))
    if "prompt_lookup" in summary:
        lookup, beside = summary["prompt_lookup"], [""] * (len(columns) - 1)
        row("prompt lookup, tau", *beside, interval(lookup["acceptance_length"], 2))
        row("prompt lookup, end to end", *beside, interval(lookup["speedup"]["end_to_end"], 2))
        row("best end to end", *beside, summary["best_of"].replace("_", " "))
    return table


def model_card(judged: dict[str, Any], hardware: dict[str, Any]) -> str:
    """The README of a judged drafter's folder: its numbers, and what they were measured on."""
    speedup = judged["speedup"]
    end_to_end = interval(speedup["end_to_end"], 2)
    gain = signed(judged["alpha_gain"]) if "alpha_gain" in judged else "not measured"
    machine = ", ".join([*hardware["gpu"], hardware["cpu"], f"{hardware['cores']} cores"])
    return (
        "# A draft model for speculative decoding\n\n"
        "Trained and judged by draftkit. Means with 95 % intervals on "
        f"{judged['alpha']['prompts']} held-out prompts, temperature {judged['temperature']:g}, "
        f"gamma {judged['gamma']}, batch {judged['batch_size']}.\n\n"
        "| | |\n|---|---|\n"
        f"| alpha = sum min(p, q) | {interval(judged['alpha'])} |\n"
        f"| gain over the drafter it started from | {gain} |\n"
        f"| tau, tokens a target pass | {interval(judged['acceptance_length'], 2)} |\n"
        f"| speedup of the rounds, measured | {speedup_text(judged)} |\n"
        f"| speedup of the rounds, predicted | {speedup['predicted']:.2f} |\n"
        f"| speedup end to end | {end_to_end} |\n"
        f"| verdict | {VERDICTS[judged['verdict']]}: {judged['reason']} |\n\n"
        f"Measured on: {machine}.\n"
    )


def signed(gain: dict[str, Any]) -> str:
    """`+0.112 [+0.101, +0.123]`."""
    low, high = gain["ci95"]
    return f"{gain['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


def lossless_text(lossless: dict[str, Any]) -> str:
    """`yes, 32 of 32` or what differed."""
    same = lossless["compared"] - lossless["statistic"]
    text = f"{'yes' if lossless['passed'] else 'NO'}, {same} of {lossless['compared']}"
    return text + (f" ({lossless['near_ties']} ties)" if lossless["near_ties"] else "")


def caption(summary: dict[str, Any]) -> str:
    """Verdict and reason, and a warning where theory and clock disagree."""
    text = f"{VERDICTS[summary['verdict']]}: {summary['reason']}"
    error = summary["speedup"]["prediction_error"]
    if abs(error) > PREDICTION_TOLERANCE:
        text += (
            f". Measured is {error:+.0%} off predicted: was the machine busy? "
            "Repeat with overwrite=true"
        )
    return text


def training_figure(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss and alpha over generated tokens, from the lines of `metrics.jsonl`, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [line for line in lines if line["section"] == "train"]
    tokens_at = {0: 0.0} | {line["step"]: line["total_tokens"] / 1000 for line in train}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(
        [tokens_at[line["step"]] for line in train],
        [line["loss"] for line in train],
        color="#1f4e79",
    )
    left.set(xlabel="thousand generated tokens", ylabel="loss (nats per token)", title="loss")
    measured = [line for line in train if line.get("alpha") is not None]
    right.plot(
        [tokens_at[line["step"]] for line in measured],
        [line["alpha"] for line in measured],
        color="#9bbbd9",
        label="training batches",
    )
    held_out = [
        line for line in lines if line["section"] == "validation" and line["step"] in tokens_at
    ]
    right.errorbar(
        [tokens_at[line["step"]] for line in held_out],
        [line["alpha"] for line in held_out],
        yerr=[
            [line["alpha"] - line["low"] for line in held_out],
            [line["high"] - line["alpha"] for line in held_out],
        ],
        color="#1f4e79",
        marker="o",
        capsize=3,
        label="validation, 95 % interval",
    )
    right.set(
        xlabel="thousand generated tokens", ylabel="alpha = sum min(p, q)", title="acceptance"
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
