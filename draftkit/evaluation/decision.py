"""What somebody reads who decides about a drafter: the page of an evaluation, or of a training.

Renders summaries; computes nothing but bands, and the sentence that follows from the numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from rich.table import Table

from draftkit.config import flatten
from draftkit.evaluation import page, report
from draftkit.evaluation.breakdown import ENTROPIES, UNSURE
from draftkit.evaluation.choice import HYBRID
from draftkit.evaluation.intervals import LEAST_UNITS
from draftkit.evaluation.page import Answer, Figure, Page, Section
from draftkit.evaluation.report import interval

TONES = {"deploy": "good", "do_not_deploy": "bad", "inconclusive": "open"}
COLOURS = {"before": page.BEFORE, "after": page.AFTER, "draft": page.AFTER}
WORTHWHILE = 1.02  # times faster: less is no reason for another number of proposals
LOST = {
    "entropy": "the target's entropy, nats",
    "position": "token of the answer",
    "category": "category of the prompt",
}
RULE = (
    "How this sentence is chosen, the cheapest remedy first. Fewer proposals: a smaller number is "
    f"computed to be at least {WORTHWHILE - 1:.0%} faster. A lower temperature: tokens of which "
    f"the target itself is unsure (entropy of {UNSURE} nats or more) stand out. More data: a "
    "category, or a stretch of the answer, stands out. A bigger drafter: none of these. A part "
    "stands out where alpha is below alpha over all and the 95 % intervals do not meet."
)


def decision_page(judged: dict[str, Any], *, name: str, **more: Any) -> Page:
    """The page of the summary of an evaluation; `name` of the experiment, `more` for `sections`."""
    reason = judged["reason"][0].upper() + judged["reason"][1:]
    return Page(
        title=f"Drafter of the experiment {name}",
        verdict=report.VERDICTS[judged["verdict"]],
        tone=TONES[judged["verdict"]],
        sentence=(
            f"{reason}. Measured by draftkit's own decoder on {judged['machine']}, "
            f"{report.sampling_text(judged['sampling'])}, batch {judged['batch_size']}; held-out "
            f"text, {report.sample_text(judged['alpha'])}."
        ),
        answers=answers(judged),
        sections=[*sections(judged, **more)],
    )


def sections(
    judged: dict[str, Any],
    *,
    traces: Sequence[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
) -> Iterator[Section]:
    """What stands below. traces: by `trace.as_rows`; trained: the summary of the training."""
    yield Section("Before, after, and other ways", [report.ways_table(judged)])
    if "speedup_by_k" in judged:
        figures = [speedup_figure(judged), position_figure(judged)]
        yield Section("How many proposals a round", [*figures, report.numbers_table(judged)])
    if judged["lost"]:
        yield Section("Where acceptance is lost", [advice(judged), lost_table(judged), RULE])
    if "engines" in judged:
        yield Section("In your engine", [report.engine_table(judged)])
    yield Section("What it costs", [cost_text(judged)])
    if trained:
        yield Section("How it was trained", [training_text(trained)])
    if traces:
        yield Section("Token by token", traces)
    tables = [report.evaluation_table(one) for one in judged["by_temperature"].values()]
    yield Section("All numbers", tables, folded=True)
    if provenance:
        yield Section("Provenance", [provenance_table(provenance)], folded=True)


def answers(judged: Mapping[str, Any]) -> list[Answer]:
    """How much faster than without a drafter, and than with what there was before."""
    use = judged["use"] if judged["use"] in judged["ways"] else "drafter"
    way = judged["ways"][use]
    new, plain = (way[f"{of}tokens_per_second_end_to_end"] for of in ("", "plain_"))
    words = (
        f"by {report.WAYS.get(use, use)}, {way['gamma']} proposals a round: {new:.0f} tokens a "
        f"second in place of {plain:.0f}, from request to last token"
    )
    if use == HYBRID and (rivals := len(judged["ways"]) - 1) > 1:
        words += f"; the interval allows for a choice of {rivals} ways"
    speedup = _times(way["speedup"]["end_to_end"])
    given = [Answer("How much faster will my server be?", *speedup, words)]
    for other, over in judged["speedup_over"].items():
        words = "the drafter by itself over prompt lookup, which needs none; end to end"
        if other == "before":
            gain = report.signed(judged["alpha_gain"])
            words = f"the drafter over the one it started from, end to end; alpha {gain}"
        given.append(Answer("Is it better than what I have?", *_times(over), words))
    return given[:2]


def _times(speedup: dict[str, Any]) -> tuple[str, str]:
    number, _, ends = interval(speedup, 2).partition(" ")
    return f"{number}×", ends or "no interval: too few documents"


def advice(judged: Mapping[str, Any]) -> str:
    """What would raise the speed-up or alpha, by `RULE`."""
    alpha, factors = judged["alpha"], judged["speedup"]["predicted_by_gamma"]
    best, used = judged["best_gamma"], judged["gamma"]
    if alpha["ci95"] is None:
        return "Of so few documents nothing follows."
    if best < used < len(factors) and factors[best] >= WORTHWHILE * factors[used]:
        return (
            f"Fewer proposals: {best} a round are computed to give a speed-up of "
            f"{factors[best]:.2f}, the {used} in use {factors[used]:.2f}."
        )
    unsure = [name for start, name in ENTROPIES.items() if start >= UNSURE]
    for by, remedy in (
        ("entropy", "A lower temperature, where the task allows it"),
        ("category", "More data like it"),
        ("position", "More data like it"),
    ):
        for row in judged["lost"].get(by, ()):
            known = by != "entropy" or (row["part"] in unsure and judged["temperature"] > 0)
            if known and row["alpha"]["ci95"] and row["alpha"]["ci95"][1] < alpha["ci95"][0]:
                return (
                    f"{remedy}: alpha is {interval(row['alpha'])} at {LOST[by]} {row['part']}, "
                    f"and {interval(alpha)} over all."
                )
    return "A bigger drafter: no part stands out in which a cheaper remedy would help."


def lost_table(judged: Mapping[str, Any]) -> Table:
    """Every part: its share of the tokens, alpha there, and its share of 1 - alpha."""
    lost = 1 - judged["alpha"]["mean"]
    few = f"No interval where fewer than {LEAST_UNITS} documents have tokens in a part."
    title = f"1 - alpha = {lost:.3f}, in parts that sum to it"
    table = Table("by", "part", title=title, caption=few)
    for name in ("tokens", "alpha there", "lost there"):
        table.add_column(name, justify="right")
    for by, parts in judged["lost"].items():
        for number, row in enumerate(parts):
            numbers = f"{row['tokens']:.0%}", interval(row["alpha"]), interval(row["lost"])
            table.add_row("" if number else LOST[by], row["part"], *numbers)
    return table


def cost_text(judged: Mapping[str, Any]) -> str:
    """What a round takes."""
    return (
        f"A plain step of the target takes {1000 * judged['plain_step_seconds']:.2f} ms. Of it one "
        f"proposal costs {judged['cost_ratio']:.3f}, verifying a round "
        f"{judged['verify_ratio']:.2f}, all else {judged['overhead_ratio']:.2f}. If all "
        f"{judged['gamma']} proposals were accepted, rounds would be "
        f"{judged['speedup']['ceiling']:.2f} times as fast."
    )


def training_text(trained: Mapping[str, Any]) -> str:
    """What training took."""
    return (
        f"Training took {trained['seconds'] / 60:.1f} minutes: {trained['tokens']:,} tokens in "
        f"{trained['steps']} steps ({trained['divergence']}, source {trained['source']}), "
        f"{trained['tokens_per_second']:,.0f} tokens a second, at most "
        f"{trained['peak_memory_bytes'] / 1e9:.2f} GB of memory."
    )


def provenance_table(provenance: Mapping[str, Any]) -> Table:
    """What the numbers were made with."""
    table = Table("what", "value")
    for key, value in flatten(provenance).items():
        table.add_row(key, " ".join(value) if isinstance(value, list) else str(value))
    return table


def speedup_figure(judged: dict[str, Any]) -> Figure:
    """Speed-up over the number of proposals: computed, with the band of tau, and measured."""

    def draw(axes: Any) -> None:
        for name, one in report.drafts_in(judged).items():
            factors, taus = one["speedup_by_k"].values(), one["acceptance_length_by_k"].values()
            numbers, colour = range(1, len(factors) + 1), COLOURS[name]
            axes.plot(numbers, factors, color=colour, label=f"{name}, computed")
            ends = [t["ci95"] or 2 * [t["mean"]] for t in taus]
            points = zip(factors, taus, ends, strict=True)
            band = [(f * low / t["mean"], f * high / t["mean"]) for f, t, (low, high) in points]
            axes.fill_between(numbers, *zip(*band, strict=True), color=colour, alpha=0.2, lw=0)
            mean = one["speedup"]["measured"]
            low, high = one["speedup"]["ci95"] or (mean, mean)
            style = {"fmt": "o", "capsize": 3, "color": colour, "label": f"{name}, measured"}
            axes.errorbar([one["gamma"]], [mean], [[mean - low], [high - mean]], **style)
        axes.axhline(1, color=page.MUTED, linewidth=1, linestyle=":")
        axes.set(xlabel="proposals a round", ylabel="speed-up of the rounds")
        axes.legend()

    return Figure(draw, "Speed-up over the number of proposals; band and bars: 95 % intervals.")


def position_figure(judged: dict[str, Any]) -> Figure:
    """How many rounds get so far: computed from the texts, and as decoded."""

    def draw(axes: Any) -> None:
        for name, one in report.drafts_in(judged).items():
            chain = [*accumulate((rate or 0 for rate in one["alpha_given_chain"]), mul)]
            for shares, mark, how in (
                (chain, "-", "computed"),
                (one["acceptance_per_position"], "o", "in decoding"),
            ):
                numbers = range(1, len(shares) + 1)
                axes.plot(numbers, shares, mark, color=COLOURS[name], label=f"{name}, {how}")
        axes.set(xlabel="position in the round", ylabel="accepted up to here", ylim=(0, 1))
        axes.legend()

    return Figure(
        draw,
        "Share of rounds whose proposals are all accepted up to a position. Computed for rounds "
        "that begin at every token; in decoding more of them begin at hard ones.",
    )
