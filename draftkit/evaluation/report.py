"""What people see: the table that ends a run, and the curves of a training.

Renders summaries; computes nothing. Tables fit 80 columns. Every rate stands beside its
definition.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftkit.artifacts import atomic_path

PREDICTION_TOLERANCE = 0.1
VERDICTS = {"deploy": "DEPLOY", "do_not_deploy": "DO NOT DEPLOY", "inconclusive": "INCONCLUSIVE"}


def interval(estimate: dict[str, Any], digits: int = 3) -> str:
    """`0.812 [0.801, 0.823]`."""
    low, high = estimate["ci95"]
    return f"{estimate['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def signed(gain: dict[str, Any]) -> str:
    """`+0.112 [+0.101, +0.123]`."""
    low, high = gain["ci95"]
    return f"{gain['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


def speedup_text(summary: dict[str, Any]) -> str:
    """The measured speed-up of the rounds with its interval."""
    speedup = summary["speedup"]
    return interval({"mean": speedup["measured"], "ci95": speedup["ci95"]}, 2)


def lossless_text(lossless: dict[str, Any]) -> str:
    """`yes, 32 of 32` or what differed."""
    same = lossless["compared"] - lossless["statistic"]
    text = f"{'yes' if lossless['passed'] else 'NO'}, {same} of {lossless['compared']}"
    return text + (f" ({lossless['near_ties']} ties)" if lossless["near_ties"] else "")


MODES = {
    "alpha": "alpha = sum min(p, q)",
    "alpha_greedy_draft": "greedy draft, p(argmax q)",
    "alpha_exact_match": "exact match, sum p q",
}
# Lines of the table below those of acceptance: the label, and the text by its summary.
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tau, tokens a target pass": lambda s: interval(s["acceptance_length"], 2),
    "accepted / drafted": lambda s: interval(r, 2) if (r := s["acceptance_rate"]) else "-",
    "c = draft / target step": lambda s: f"{s['cost_ratio']:.3f}",
    "v, o = verify, rest / step": lambda s: f"{s['verify_ratio']:.2f}, {s['overhead_ratio']:.2f}",
    "speedup measured": speedup_text,
    "speedup predicted": lambda s: f"{s['speedup']['predicted']:.2f}",
    "ceiling at alpha = 1": lambda s: f"{s['speedup']['ceiling']:.2f}",
    "speedup end to end": lambda s: interval(s["speedup"]["end_to_end"], 2),
    "best gamma": lambda s: str(s["best_gamma"]),
    "tokens/s plain": lambda s: f"{s['tokens_per_second']['autoregressive']:.0f}",
    "tokens/s drafted": lambda s: f"{s['tokens_per_second']['speculative']:.0f}",
    "lossless, greedy float32": lambda s: lossless_text(s["lossless"]),
}


def evaluation_table(summary: dict[str, Any]) -> Table:
    """One column a draft (before and after, where there are two), verdict and reason below."""
    drafts = {"draft": summary}
    if "before" in summary:
        drafts = {"before": summary["before"], "after": summary}
    proposer = summary.get("proposer", "sampled")
    proposer = "" if proposer == "sampled" else f"proposer {proposer}, "
    title = (
        f"{proposer}temperature {summary['temperature']:g}, gamma {summary['gamma']}, "
        f"batch {summary['batch_size']}, {summary['alpha']['prompts']} held-out prompts, "
        "95 % intervals"
    )
    table = Table(title=title, caption=caption(summary), show_edge=False, pad_edge=False)
    table.add_column("")
    for name in drafts:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in MODES.items():
        table.add_row(label, *(interval(draft[key]) for draft in drafts.values()))
        if f"{key}_gain" in summary:
            table.add_row("  paired gain", "", signed(summary[f"{key}_gain"]))
    for label, text in ROWS.items():
        table.add_row(label, *map(text, drafts.values()))
    if "prompt_lookup" in summary:
        lookup, beside = summary["prompt_lookup"], [""] * (len(drafts) - 1)
        whole = interval(lookup["speedup"]["end_to_end"], 2)
        table.add_row("prompt lookup, tau", *beside, interval(lookup["acceptance_length"], 2))
        table.add_row("prompt lookup, end to end", *beside, whole)
        table.add_row("best end to end", *beside, summary["best_of"].replace("_", " "))
    return table


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


def model_card(judged: dict[str, Any], hardware: dict[str, Any]) -> str:
    """The README of a judged drafter's folder: its numbers, and what they were measured on."""
    gain = signed(judged["alpha_gain"]) if "alpha_gain" in judged else "not measured"
    machine = ", ".join([*hardware["gpu"], hardware["cpu"], f"{hardware['cores']} cores"])
    rows = {
        MODES["alpha"]: interval(judged["alpha"]),
        "gain over the drafter it started from": gain,
        "tau, tokens a target pass": interval(judged["acceptance_length"], 2),
        "speedup of the rounds, measured": speedup_text(judged),
        "speedup of the rounds, predicted": f"{judged['speedup']['predicted']:.2f}",
        "speedup end to end": interval(judged["speedup"]["end_to_end"], 2),
        "verdict": f"{VERDICTS[judged['verdict']]}: {judged['reason']}",
    }
    return (
        "# A draft model for speculative decoding\n\n"
        "Trained and judged by draftkit. Means with 95 % intervals on "
        f"{judged['alpha']['prompts']} held-out prompts, temperature {judged['temperature']:g}, "
        f"gamma {judged['gamma']}, batch {judged['batch_size']}.\n\n"
        "| | |\n|---|---|\n"
        + "".join(f"| {label} | {text} |\n" for label, text in rows.items())
        + f"\nMeasured on: {machine}.\n"
    )


def training_figure(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss and alpha over generated tokens, from the lines of `metrics.jsonl`, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [line for line in lines if line["section"] == "train"]
    tokens_at = {0: 0.0} | {line["step"]: line["total_tokens"] / 1000 for line in train}

    def columns(chosen: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
        return [tokens_at[line["step"]] for line in chosen], [line[key] for line in chosen]

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(*columns(train, "loss"), color="#1f4e79")
    left.set(xlabel="thousand generated tokens", ylabel="loss (nats per token)", title="loss")
    measured = [line for line in train if line.get("alpha") is not None]
    right.plot(*columns(measured, "alpha"), color="#9bbbd9", label="training batches")
    validation = [line for line in lines if line["section"] == "validation"]
    held_out = [line for line in validation if line["step"] in tokens_at]
    below = [line["alpha"] - line["low"] for line in held_out]
    above = [line["high"] - line["alpha"] for line in held_out]
    right.errorbar(
        *columns(held_out, "alpha"),
        yerr=[below, above],
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
