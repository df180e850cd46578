"""What people see: the lines that end a run, and the tables behind them.

Renders summaries; computes nothing. Tables fit 80 columns. Every rate stands beside its
definition.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from draftkit.config import SamplingConfig
from draftkit.evaluation.intervals import LEAST_UNITS
from draftkit.evaluation.judge import PREDICTION_TOLERANCE
from draftkit.templates import interval, signed

VERDICTS = {"deploy": "DEPLOY", "do_not_deploy": "DO NOT DEPLOY", "inconclusive": "INCONCLUSIVE"}


def speedup_text(summary: dict[str, Any]) -> str:
    """The measured speed-up of the rounds with its interval."""
    speedup = summary["speedup"]
    return interval({"mean": speedup["measured"], "ci95": speedup["ci95"]}, 2)


def lossless_text(lossless: dict[str, Any]) -> str:
    """`yes, 32 of 32` or what differed."""
    if lossless["passed"] is None:
        return "not checked"
    same = lossless["compared"] - lossless["statistic"]
    text = f"{'yes' if lossless['passed'] else 'NO'}, {same} of {lossless['compared']}"
    return text + (f" ({lossless['near_ties']} ties)" if lossless["near_ties"] else "")


def lossless_label(lossless: dict[str, Any]) -> str:
    """`lossless, greedy float32`, by the dtype of the check."""
    return " ".join(["lossless, greedy", *lossless["method"].split(" in ")[1:]])


def sample_text(estimate: dict[str, Any]) -> str:
    """`95 % intervals, 96 prompts of 28 documents`, or why there are none."""
    prompts, documents = estimate["prompts"], estimate["documents"]
    if estimate["ci95"] is None:
        return f"no intervals: {documents} documents, {LEAST_UNITS} needed"
    return f"95 % intervals, {prompts} prompts of {documents} documents"


def sampling_text(sampling: Mapping[str, float]) -> str:
    """`temperature 0.6, top-k 20, top-p 0.95`: what of it changes a distribution."""
    neutral = vars(SamplingConfig())
    changing = (key for key in sampling if key == "temperature" or sampling[key] != neutral[key])
    return ", ".join(f"{key.replace('_', '-')} {sampling[key]:g}" for key in changing)


TAU = "tau, tokens a target pass"
MODES = {
    "alpha": "alpha = sum min(p, q)",
    "alpha_greedy_draft": "argmax drafts, p(argmax q)",
    "alpha_exact_match": "exact match, sum p q",
}
# Lines of the table below those of acceptance: the label, and the text by its summary.
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    TAU: lambda s: interval(s["acceptance_length"], 2),
    "accepted / drafted": lambda s: interval(r, 2) if (r := s["acceptance_rate"]) else "-",
    "c = draft / target step": lambda s: f"{s['cost_ratio']:.3f}",
    "v, o = verify, rest / step": lambda s: f"{s['verify_ratio']:.2f}, {s['overhead_ratio']:.2f}",
    "speedup measured": speedup_text,
    "speedup predicted": lambda s: f"{s['speedup']['predicted']:.2f}",
    "ceiling at alpha = 1": lambda s: f"{s['speedup']['ceiling']:.2f}",
    "speedup end to end": lambda s: interval(s["speedup"]["end_to_end"], 2),
    "gamma in use, best gamma": lambda s: f"{s['gamma']}, {s['best_gamma']}",
    "tokens/s plain": lambda s: f"{s['tokens_per_second']['autoregressive']:.0f}",
    "tokens/s drafted": lambda s: f"{s['tokens_per_second']['speculative']:.0f}",
}


def evaluation_table(summary: dict[str, Any]) -> Table:
    """One column a draft (before and after, where there are two), verdict and reason below."""
    drafts = drafts_in(summary)
    proposer = summary["proposer"]
    proposer = "" if proposer == "sampled" else f"proposer {proposer}, "
    title = (
        f"{proposer}temperature {summary['temperature']:g}, "
        f"batch {summary['batch_size']}, {sample_text(summary['alpha'])}"
    )
    table = Table(
        title=title, caption=caption(summary), show_edge=False, pad_edge=False, min_width=72
    )
    table.add_column("")
    for name in drafts:
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in MODES.items():
        table.add_row(label, *(interval(draft[key]) for draft in drafts.values()))
        if f"{key}_gain" in summary:
            table.add_row("  paired gain", "", signed(summary[f"{key}_gain"]))
    for label, text in ROWS.items():
        table.add_row(label, *map(text, drafts.values()))
        if label == TAU and "acceptance_length_gain" in summary:
            table.add_row("  paired gain", "", signed(summary["acceptance_length_gain"]))
    checks = [draft["lossless"] for draft in drafts.values()]
    table.add_row(lossless_label(checks[-1]), *map(lossless_text, checks))
    return table


WAYS = {"prompt_lookup": "prompt lookup", "hybrid": "drafter + prompt lookup"}
WAYS["before"] = "drafter before"


def ways_table(summary: dict[str, Any]) -> Table:
    """Every way that was timed, at every temperature, the fastest first."""
    title = "all ways, end to end; *: the best of those that surely gain"
    rivals = max(len(one["ways"]) for one in summary["by_temperature"].values()) - 1
    note = f"The best is chosen of {rivals}: all intervals but the judged way's are wider."
    note = note if rivals > 1 else None
    table = Table(title=title, caption=note, show_edge=False, pad_edge=False, min_width=72)
    table.add_column("T", justify="right")
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "speed-up", "tau", "K"):
        table.add_column(name, justify="right", no_wrap=True)
    for temperature, judged in summary["by_temperature"].items():
        ways = judged["ways"]
        best = max(ways, key=lambda name: ways[name]["speedup"]["end_to_end"]["mean"])
        plain = ways[best]["plain_tokens_per_second_end_to_end"]
        rows = [(1.0, "plain", f"{plain:.1f}", "1", "1", "0")]
        for key, one in ways.items():
            name, whole = WAYS.get(key, key), one["speedup"]["end_to_end"]
            name += " *" * (key == judged["best_of"])
            rate, tau = one["tokens_per_second_end_to_end"], one["acceptance_length"]["mean"]
            cells = f"{rate:.1f}", interval(whole, 2), f"{tau:.2f}", str(one["gamma"])
            rows.append((whole["mean"], name, *cells))
        for number, (_, *cells) in enumerate(sorted(rows, reverse=True)):
            table.add_row(
                "" if number else temperature, *cells, end_section=number == len(rows) - 1
            )
    return table


def numbers_table(summary: dict[str, Any]) -> Table:
    """By the number of proposals K: what is accepted there, tau and the predicted speed-up."""
    best = max(summary["speedup_by_k"], key=summary["speedup_by_k"].__getitem__)
    title = "by the number of proposals K: computed from the scored texts, best K *"
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("K", no_wrap=True)
    for number in summary["speedup_by_k"]:
        table.add_column(f"{number}*" if number == best else number, justify="right", no_wrap=True)
    rows = {
        "alpha at K": summary["alpha_by_position"],
        "after K - 1": summary["alpha_given_chain"],
        "tau": [one["mean"] for one in summary["acceptance_length_by_k"].values()],
        "speed-up": summary["speedup_by_k"].values(),
    }
    for label, values in rows.items():
        texts = ("-" if one is None else f"{one:.{1 + (one < 10)}f}" for one in values)
        table.add_row(label, *texts)
    return table


def engine_table(summary: dict[str, Any]) -> Table:
    """What each engine would accept of the judged drafter."""
    title = f"in your engine, its default first (computed; temperature {summary['temperature']:g})"
    table = Table(title=title, caption=kept_ids_text(summary), show_edge=False, pad_edge=False)
    for name in ("engine", "how it drafts"):
        table.add_column(name, no_wrap=True)
    for name in ("gamma", "accepts", "tokens a pass"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in summary["engines"]:
        engine, before = row["engine"] if row["engine"] != before else "", row["engine"]
        accepts, length = f"{row['acceptance']['mean']:.3f}", interval(row["acceptance_length"], 2)
        table.add_row(engine, row["setting"], str(row["gamma"]), accepts, length)
    return table


def kept_ids_text(summary: dict[str, Any]) -> str:
    """What engines do not know of a drafter that proposes some ids alone; empty for all others."""
    if not (kept := summary.get("kept_ids")):
        return ""
    return (
        f"These rates are of a drafter that proposes {kept:,} ids alone (kept_ids.json), which "
        "only draftkit knows. Give an engine the folder that `export` writes: there no other id is "
        "ever the most likely, and all others together get a little of the probability."
    )


def result_lines(summary: dict[str, Any]) -> Table:
    """Six lines: what changed from `before` to the judged drafter, and the verdict."""
    before = summary["before"]
    table = Table(caption=caption(summary), box=None, pad_edge=False, min_width=76)
    table.add_column()
    for name in ("before", "after", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {
        "alpha, sampled drafts": "alpha",
        "alpha, argmax drafts": "alpha_greedy_draft",
        "tokens a target pass": "acceptance_length",
    }
    for label, key in rows.items():
        gain = signed(summary[f"{key}_gain"])
        table.add_row(label, f"{before[key]['mean']:.3f}", interval(summary[key]), gain)
    old, new = (one["speedup"]["end_to_end"] for one in (before, summary))
    table.add_row("speed-up, end to end", f"{old['mean']:.3f}", interval(new), "")
    return table


def verdict_text(summary: dict[str, Any]) -> str:
    """The verdict, what it speaks of, and its reason."""
    proposer = summary.get("use", summary["proposer"])
    proposer = "sampled drafts" if proposer == "sampled" else proposer
    scope = f"draftkit's decoder, {proposer}, batch {summary['batch_size']}, {summary['machine']}"
    return f"{VERDICTS[summary['verdict']]} ({scope}): {summary['reason']}"


def caption(summary: dict[str, Any]) -> str:
    """Verdict and reason, and a warning where theory and clock disagree on what decides."""
    text = verdict_text(summary)
    speedup = summary["speedup"]
    error, decides = speedup["prediction_error"], speedup["end_to_end"]["ci95"] is not None
    if decides and abs(error) > PREDICTION_TOLERANCE:
        text += (
            f". Measured is {error:+.0%} off predicted: was the machine busy (timing.json)? "
            "Repeat with overwrite=true"
        )
    return text


def drafts_in(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The judged draft, after the one that it started from where both were judged."""
    if "before" not in summary:
        return {"draft": summary}
    return {"before": summary["before"], "after": summary}
