"""What people see: the lines that end a run, and the tables behind them.

Renders summaries; computes nothing. Tables fit 80 columns. Every rate stands beside its
definition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.table import Column, Table

from draftkit.evaluation.intervals import LEAST_UNITS
from draftkit.templates import interval, signed

PREDICTION_TOLERANCE = 0.1  # of measured by predicted: beyond, the machine may have been busy
numeric = partial(Column, justify="right", no_wrap=True)
BARE: Any = {"show_edge": False, "pad_edge": False}
VERDICTS = {"deploy": "DEPLOY", "do_not_deploy": "DO NOT DEPLOY", "inconclusive": "INCONCLUSIVE"}


def lossless_text(lossless: dict[str, Any]) -> str:
    """`yes, 32 of 32` or what differed."""
    if lossless["passed"] is None:
        return "not checked"
    same = lossless["compared"] - lossless["statistic"]
    text = f"{'yes' if lossless['passed'] else 'NO'}, {same} of {lossless['compared']}"
    return text + (f" ({lossless['near_ties']} ties)" if lossless["near_ties"] else "")


def sample_text(estimate: dict[str, Any]) -> str:
    """`95 % intervals, 96 prompts of 28 documents`, or why there are none."""
    prompts, documents = estimate["prompts"], estimate["documents"]
    if estimate["ci95"] is None:
        return f"no intervals: {documents} documents, {LEAST_UNITS} needed"
    return f"95 % intervals, {prompts} prompts of {documents} documents"


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
    "speedup measured": lambda s: interval(s["speedup"] | {"mean": s["speedup"]["measured"]}, 2),
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
    columns = "", *map(numeric, drafts)
    table = Table(*columns, title=title, caption=caption(summary), min_width=72, **BARE)
    for key, label in MODES.items():
        table.add_row(label, *(interval(draft[key]) for draft in drafts.values()))
        if f"{key}_gain" in summary:
            table.add_row("  paired gain", "", signed(summary[f"{key}_gain"]))
    for label, text in ROWS.items():
        table.add_row(label, *map(text, drafts.values()))
        if label == TAU and "acceptance_length_gain" in summary:
            table.add_row("  paired gain", "", signed(summary["acceptance_length_gain"]))
    checks = [draft["lossless"] for draft in drafts.values()]
    dtype = checks[-1]["method"].split(" in ")[1:]  # of the check, where there was one
    table.add_row(" ".join(["lossless, greedy", *dtype]), *map(lossless_text, checks))
    return table


def bounds_table(summary: dict[str, Any]) -> Table:
    """What is sure of each draft where an engine alone scores, at every temperature; of tau about.

    Whether a token was a proposal is not known there, so tau takes what is sure at its position.
    """
    title = f"by the scores of an engine; {sample_text(summary['alpha'])}"
    note = f"{VERDICTS[summary['verdict']]}: {summary['reason']}"
    columns = Column("T", justify="right"), "", *map(numeric, drafts_in(summary))
    table = Table(*columns, title=title, caption=note, min_width=72, **BARE)
    for temperature, judged in summary["by_temperature"].items():
        drafts = drafts_in(judged).values()
        table.add_row(temperature, "alpha, at least", *(interval(one["alpha"]) for one in drafts))
        missing = (f"+{one['alpha_error_bound']:.3f}" for one in drafts)
        table.add_row("", "  may be missing, at most", *missing)
        if "alpha_gain" in judged:
            table.add_row("", "  paired gain of that", "", signed(judged["alpha_gain"]))
        for k in ("2", "4", "8"):
            lengths = (interval(one["acceptance_length_by_k"][k], 2) for one in drafts)
            table.add_row("", f"tau at K = {k}, about", *lengths, end_section=k == "8")
    return table


WAYS = {"prompt_lookup": "prompt lookup", "hybrid": "drafter + prompt lookup"}
WAYS["before"] = "drafter before"


def proposals_text(way: dict[str, Any]) -> str:
    """K of a way; of a hybrid that of a guess, and that of its drafter: `5, 3`."""
    return ", ".join(str(way[key]) for key in ("gamma", "draft_gamma") if key in way)


def ways_table(summary: dict[str, Any]) -> Table:
    """Every way that was timed, at every temperature, the fastest first."""
    title = "all ways, end to end; *: the best of those that surely gain"
    rivals = max(len(one["ways"]) for one in summary["by_temperature"].values()) - 1
    notes = [f"The best is chosen of {rivals}: all intervals but the judged way's are wider."]
    notes = notes if rivals > 1 else []
    labels = Column("T", justify="right"), Column("", no_wrap=True)
    columns = *labels, *map(numeric, ("tokens/s", "speed-up", "tau", "K"))
    table = Table(*columns, title=title, min_width=76, **BARE)
    for temperature, judged in summary["by_temperature"].items():
        ways = judged["ways"]
        best = max(ways, key=lambda name: ways[name]["speedup"]["end_to_end"]["mean"])
        plain = ways[best]["plain_tokens_per_second_end_to_end"]
        rows = [(1.0, "plain", f"{plain:.1f}", "1", "1", "0")]
        for key, one in ways.items():
            name, whole = WAYS.get(key, key), one["speedup"]["end_to_end"]
            name += " *" * (key == judged["best_of"])
            rate, tau = one["tokens_per_second_end_to_end"], one["acceptance_length"]["mean"]
            if "draft_gamma" in one:
                keys = "gamma", "draft_gamma", "lookup_min"
                settings = " ".join(f"decode.{setting}={one[setting]}" for setting in keys)
                notes.append(f"{key}, T = {temperature}: {settings}")
            cells = f"{rate:.1f}", interval(whole, 2), f"{tau:.2f}", proposals_text(one)
            rows.append((whole["mean"], name, *cells))
        for number, (_, *cells) in enumerate(sorted(rows, reverse=True)):
            table.add_row(
                "" if number else temperature, *cells, end_section=number == len(rows) - 1
            )
    table.caption = "\n".join(notes) or None
    return table


def numbers_table(summary: dict[str, Any]) -> Table:
    """By the number of proposals K: what is accepted there, tau and the predicted speed-up."""
    best = max(summary["speedup_by_k"], key=summary["speedup_by_k"].__getitem__)
    title = "by the number of proposals K: computed from the scored texts, best K *"
    marked = (f"{number}*" if number == best else number for number in summary["speedup_by_k"])
    columns = Column("K", no_wrap=True), *map(numeric, marked)
    table = Table(*columns, title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
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
    note = ""
    if kept := summary.get("kept_ids"):
        note = (
            f"These rates are of a drafter that proposes {kept:,} ids alone (kept_ids.json), which "
            "only draftkit knows. Give an engine the folder that `export` writes: there no other "
            "id is ever the most likely, and all others together get a little of the probability."
        )
    labels = (Column(name, no_wrap=True) for name in ("engine", "how it drafts"))
    columns = *labels, *map(numeric, ("gamma", "accepts", "tokens a pass"))
    table = Table(*columns, title=title, caption=note, **BARE)
    before = ""
    for row in summary["engines"]:
        engine, before = row["engine"] if row["engine"] != before else "", row["engine"]
        accepts, length = f"{row['acceptance']['mean']:.3f}", interval(row["acceptance_length"], 2)
        table.add_row(engine, row["setting"], str(row["gamma"]), accepts, length)
    return table


def result_lines(summary: dict[str, Any]) -> Table:
    """Six lines: what changed from `before` to the judged drafter, and the verdict."""
    before = summary["before"]
    columns = "", *map(numeric, ("before", "after", "gain"))
    table = Table(*columns, caption=caption(summary), box=None, pad_edge=False, min_width=76)
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


def caption(summary: dict[str, Any]) -> str:
    """The verdict, what it speaks of, its reason; a warning where theory and clock disagree."""
    proposer = summary.get("use", summary["proposer"])
    proposer = "sampled drafts" if proposer == "sampled" else proposer
    scope = f"draftkit's decoder, {proposer}, batch {summary['batch_size']}, {summary['machine']}"
    text = f"{VERDICTS[summary['verdict']]} ({scope}): {summary['reason']}"
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
