"""What the decoder's benchmark shows people: a table of 80 columns for each setting.

Renders the points that `pipelines.benchmarks.decoder` measures; computes nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.evaluation.report import interval
from draftkit.evaluation.walltime import PLAIN

from .random_models import LIKELY_ALPHA

SPECULATIVE, ADAPTIVE = "speculative", "adaptive"
HF_PLAIN, HF_ASSISTED, HF_LOOKUP = "hf_plain", "hf_assisted", "hf_lookup"
LABELS = {
    PLAIN: "plain",
    SPECULATIVE: "speculative",
    ADAPTIVE: "adaptive gamma",
    HF_PLAIN: "HF plain",
    HF_ASSISTED: "HF assisted",
    HF_LOOKUP: "HF prompt lookup",
}
LEGEND = (
    "HF: Hugging Face generate; all else is this decoder. Tokens per second from request to last "
    "token, prefill included: medians over chunks with quartiles. Ratios: medians of paired "
    "chunks with exact 95 % intervals."
)

Point = dict[str, Any]


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """All tables, those of random models behind those of the pair."""
    print_points(summary["points"], console)
    for name, measured in summary["random"].items():
        console.print(f"Random weights: {name}")
        print_points(measured["points"], console)
        console.print(
            f"Plain decoding of one row reads {measured['weight_bytes_per_second'] / 1e9:.1f} "
            f"GB/s of weights; its costs give {measured['likely_speedup']:.2f} at an acceptance of "
            f"{LIKELY_ALPHA}."
        )
    console.print(LEGEND)
    console.print(
        f"{summary['dtype']}; {summary['compile_seconds']:.0f} s of compiling in no measured time; "
        f"peak memory {summary['peak_memory_bytes'] / 1e9:.2f} GB."
    )


def print_points(points: Sequence[Point], console: Console) -> None:
    """One table for each setting, every method a row."""
    for _, group in groupby(points, lambda point: (point["temperature"], point["batch_size"])):
        console.print(setting_table(list(group)))


def setting_table(points: Sequence[Point]) -> Table:
    """The methods of one setting, with the prediction and the comparison of answers below."""
    first, temperature = points[0], points[0]["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    kind = next((kind for kind in ("compiled", "captured") if first[kind]), "eager")
    table = Table(
        title=f"{sampling}, batch {first['batch_size']}, {kind}: "
        f"{first['prompts']} prompts in {first['chunks']} chunks",
        caption="\n".join(line for point in points for line in remarks(point)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "x plain", "x HF plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        rate = point["tokens_per_second"]
        low, high = rate["quartiles"]
        ratios = (point["ratios"].get(other) for other in (PLAIN, HF_PLAIN))
        table.add_row(
            LABELS[point["method"]],
            f"{rate['median']:.0f} [{low:.0f}, {high:.0f}]",
            *(interval({"mean": one["median"], **one}, 2) if one else "" for one in ratios),
        )
    return table


def remarks(point: Point) -> Iterator[str]:
    """What else is known of a point, a line each."""
    if "acceptance_length" in point:
        speedup = point["speedup"]
        yield (
            f"gamma {point['gamma']}, tau {interval(point['acceptance_length'], 2)}, "
            f"c {point['cost_ratio']:.3f}, v {point['verify_ratio']:.2f}, "
            f"o {point['overhead_ratio']:.3f}"
        )
        of = "" if point["batch_size"] == 1 else f" of full batches, tau {point['full_length']:.2f}"
        yield (
            f"rounds alone{of}: predicted {speedup['predicted']:.2f}, "
            f"measured {speedup['measured']:.2f} ({point['prediction_error']:+.1%})"
        )
    if "beside_hf" in point:
        same = point["beside_hf"]
        yield (
            f"{LABELS[point['method']]} = HF plain: {same['identical']} of {same['compared']} "
            f"answers, {same['near_ties']} near-ties, {same['different']} different"
        )
