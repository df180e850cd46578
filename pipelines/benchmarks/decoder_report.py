"""What people see of a benchmark: one table a setting, every method a row.

Renders points; computes nothing. Tables fit 80 columns.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from draftkit.evaluation.report import interval

LABELS = {
    "plain": "plain",
    "speculative": "speculative",
    "adaptive": "adaptive gamma",
    "eager_plain": "eager plain",
    "eager_speculative": "eager speculative",
    "sampled": "sampled drafts",
    "argmax": "argmax drafts",
    "unigram": "unigram counts",
    "bigram": "bigram counts",
    "prompt_lookup": "prompt lookup",
    "ngram": "n-gram memory",
    "hybrid": "lookup or draft",
    "staged": "lookup for draft",
    "hf_plain": "HF plain",
    "hf_assisted": "HF assisted",
    "hf_lookup": "HF prompt lookup",
    "hf_static": "HF static cache",
}
LEGEND = (
    "HF: Hugging Face generate; all else is this decoder. Tokens per second from request to last "
    "token, prefill included: medians over chunks with quartiles. Ratios: medians of paired "
    "chunks with exact 95 % intervals."
)


def benchmark_tables(points: Sequence[dict[str, Any]]) -> list[Table]:
    """One table for each setting, in order."""
    settings = groupby(points, lambda point: (point["temperature"], point["batch_size"]))
    return [setting_table(list(group)) for _, group in settings]


def setting_table(points: Sequence[dict[str, Any]]) -> Table:
    """The methods of one setting, with the prediction and the comparison of answers below."""
    first, temperature = points[0], points[0]["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    kinds = [kind for kind in ("compiled", "captured") if any(point.get(kind) for point in points)]
    title = (
        f"{sampling}, batch {first['batch_size']}, {kinds[0] if kinds else 'eager'}: "
        f"{first['prompts']} prompts in {first['chunks']} chunks"
    )
    caption = "\n".join(line for point in points for line in remarks(point))
    edges = {"show_edge": False, "pad_edge": False}
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, **edges)
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "x plain", "x HF plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        rate, ratios = point["tokens_per_second"], point["ratios"]
        low, high = rate["quartiles"]
        cells = [f"{rate['median']:.0f} [{low:.0f}, {high:.0f}]"]
        for other in ("plain", "hf_plain"):
            ratio = ratios.get(other)
            cells.append(interval({"mean": ratio["median"], **ratio}, 2) if ratio else "")
        table.add_row(LABELS[point["method"]], *cells)
    return table


def remarks(point: dict[str, Any]) -> Iterator[str]:
    """What else is known of a point, a line each."""
    if "acceptance_length" in point:
        speedup, error = point["speedup"], point["prediction_error"]
        yield (
            f"gamma {point['gamma']}, tau {interval(point['acceptance_length'], 2)}, "
            f"c {point['cost_ratio']:.3f}, v {point['verify_ratio']:.2f}, "
            f"o {point['overhead_ratio']:.3f}"
        )
        of = "" if point["batch_size"] == 1 else f" of full batches, tau {point['full_length']:.2f}"
        yield (
            f"rounds alone{of}: predicted {speedup['predicted']:.2f}, "
            f"measured {speedup['measured']:.2f} ({error:+.1%})"
        )
    if "gammas" in point:
        total = sum(point["gammas"].values())
        shares = (f"{gamma} in {count / total:.0%}" for gamma, count in point["gammas"].items())
        yield f"adaptive gamma: {', '.join(shares)} of rounds"
    if "beside_hf" in point:
        same = point["beside_hf"]
        yield (
            f"{LABELS[point['method']]} = HF plain: {same['identical']} of {same['compared']} "
            f"answers, {same['near_ties']} near-ties, {same['different']} different"
        )
