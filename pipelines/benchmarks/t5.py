"""`python -m pipelines.benchmarks.t5`: pairs of T5 type, as in the papers' tables, in small.

Writes a parallel text (numbers to words), a tokenizer and an untrained T5 below `<root>/t5`; trains
the target by `prepare`; then distils and judges drafters of three sizes, as any other pair. Prints
the tables of docs/results/t5.md. Arguments are settings of the experiment `t5`.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
)

from draftkit.artifacts import atomic_path, read_json
from draftkit.config import Config
from draftkit.decoding.trace import KINDS
from draftkit.evaluation.judge import Prompts, timing
from draftkit.evaluation.report import interval, speedup_text
from draftkit.models.loading import load_draft, load_target, save_model

from ..configuration import compose_config
from ..contexts import read_contexts
from ..evaluate import TIMING, TRACE
from ..plan import CONTEXTS, EVALUATE, PREPARE, TRAIN
from ..product import SUMMARY, Stage
from ..sheet import markdown
from ..stage import ensure
from .decoder import HF_ASSISTED, HF_PLAIN, PLAIN, SPECULATIVE, measure

UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ("", " thousand", " million", " billion")
ROWS, VOCABULARY = 6000, 256
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
TARGET = (
    *("draft.pretrain.num_hidden_layers=4", "draft.pretrain.hidden_size=128"),
    *("draft.pretrain.max_steps=1500", "draft.pretrain.learning_rate=1e-3"),
)
ONE_OF_THEM = "2 layers of width 64"
DRAFTERS = {  # of encoder and decoder alike, but for the one that is cut
    "1 layer of width 32": ("draft.pretrain.num_hidden_layers=1", "draft.pretrain.hidden_size=32"),
    ONE_OF_THEM: ("draft.pretrain.num_hidden_layers=2", "draft.pretrain.hidden_size=64"),
    "the target's first decoder layer": ("draft.shrink.layers=1",),
}
GAMMAS = (3, 5, 7)
TRACED = (7, 3)  # proposals
CALLS = {"encoder": "#e8b93b", "drafter": "#4a7fc1", "target": "#8e5ea2"}  # and their colours
METHODS = (PLAIN, SPECULATIVE, HF_PLAIN, HF_ASSISTED)
DIVERGENCES, COUNTED = ("forward_kl", "jsd", "tvd"), ("unigram", "bigram")


def spoken(number: int) -> str:
    """`number`, below 10^12, in English words."""
    if number < 20:
        return UNITS[number]
    parts = []
    for power, scale in reversed([*enumerate(SCALES)]):
        group = number // 1000**power % 1000
        hundreds, rest = divmod(group, 100)
        words = [UNITS[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words += [TENS[rest // 10 - 2], *([UNITS[rest % 10]] if rest % 10 else [])]
        elif rest:
            words.append(UNITS[rest])
        parts += [" ".join(words) + scale] if words else []
    return " ".join(parts)


def pairs(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows of a number, written in one of three ways, and its words."""
    draw = random.Random(seed)
    for _ in range(count):
        number = draw.randrange(10 ** draw.randint(6, 12))
        shown = draw.choice([f"{number}", f"{number:,}", " ".join(str(number))])
        yield {"prompt": f"say {shown}", "completion": spoken(number)}


def pieces(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer as SentencePiece makes them: pieces with spaces, an end behind every text."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )


def write_seed(folder: Path, *, count: int = ROWS, vocab_size: int = VOCABULARY) -> None:
    """Write `rows.jsonl`, and in `model` the tokenizer with an untrained T5 of the least size."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [*pairs(count)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = pieces([text for row in rows for text in row.values()], vocab_size)
    shape = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    shape.pad_token_id, shape.eos_token_id = 0, 1
    shape.decoder_start_token_id = 0  # pyrefly: ignore[missing-attribute]
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(shape)
    save_model(model, tokenizer, folder / "model")


def speedups(judged: dict[str, Any]) -> list[str]:
    """Of the rounds, over plain decoding: predicted, and measured with its interval."""
    return [f"{judged['speedup']['predicted']:.2f}", speedup_text(judged)]


def show(*rows: Sequence[object]) -> None:
    """Print a Markdown table, its head first."""
    print(markdown(*rows), flush=True)


def calls(folder: Path, way: str) -> list[tuple[str, float]]:
    """What the first answer of an evaluation took: the calls in their order, with milliseconds.

    The encoders' time is the median of all answers of `way`, that of a call the median of its kind
    (`plain`: an answer as long, without a drafter).
    """
    judged, rounds = read_json(folder / SUMMARY), read_json(folder / TRACE)[0]["rounds"]
    prefills = read_json(folder / TIMING)["0"][way]["prefill_seconds"]
    made = [("encoder", 1e3 * median(prefills))]
    step = 1e3 * judged["plain_step_seconds"]
    for one in rounds:
        if way == PLAIN:
            made += [("target", step)] * sum(kind in KINDS for kind, _ in one["parts"])
        else:
            made += [("drafter", step * judged["cost_ratio"])] * one["proposed"]
            made.append(("target", step * judged["verify_ratio"]))
    return made


def draw(rows: dict[str, list[tuple[str, float]]], path: Path) -> None:
    """Figure 5 of Leviathan et al. (2211.17192): the calls of one answer, their widths to scale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    for height, made in enumerate(reversed(rows.values())):
        names, widths = zip(*made, strict=True)
        starts, colours = [0.0, *accumulate(widths)][:-1], [CALLS[name] for name in names]
        axes.barh(height, widths, 0.6, starts, color=colours, edgecolor="white", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [*reversed(rows)])
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend = [Patch(color=colour, label=name) for name, colour in CALLS.items()]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(CALLS), frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def beside_hugging_face(config: Config) -> Iterator[list[object]]:
    """Tokens a second of plain and speculative greedy decoding, ours and of transformers, in turns:
    rows of a table."""
    target = load_target(config.target, config.hardware)
    draft = load_draft(config.draft, target)
    folder = ensure(CONTEXTS, config)
    held_out, others = (read_contexts(folder, split) for split in ("test", "validation"))
    prompts = Prompts(
        test=[one.prompt_ids for one in held_out], calibration=[one.prompt_ids for one in others]
    )
    texts = [*prompts.test, *prompts.calibration]
    greedy = replace(config.sampling, temperature=0.0)
    setting = timing(texts, greedy, target.eos_token_ids, config)
    points = measure(config, target.adapter, draft, prompts, setting, METHODS)
    ratios = next(one for one in points if one["method"] == SPECULATIVE)["ratios"]
    for one in points:
        ratio = ratios.get(one["method"])
        over = ratio and interval({"mean": ratio["median"], **ratio}, 2)
        yield [one["method"], f"{one['tokens_per_second']['median']:.0f}", over or 1]


def run(overrides: Sequence[str]) -> None:
    """Make what is missing, and print the tables."""
    given = [one.removeprefix("root=") for one in overrides if one.startswith("root=")]
    root = Path([Config.root, *given][-1]) / "t5"
    if not (root / "model").is_dir():
        write_seed(root)
    text = ("+experiment=t5", f"data.path={root / 'rows.jsonl'}")

    def made(stage: Stage, *settings: str) -> Path:
        return ensure(stage, compose_config([*text, *settings, *overrides]))

    target = made(PREPARE, f"target.path={root / 'model'}", *TARGET) / "draft"

    def summary(stage: Stage, *settings: str) -> dict[str, Any]:
        return read_json(made(stage, f"target.path={target}", *settings) / SUMMARY)

    sizes, drafters = [], []
    for index, (size, shape) in enumerate(DRAFTERS.items()):
        own = (f"target.path={target}", f"name=t5_{index}", *shape)
        for at, one in summary(EVALUATE, *own)["by_temperature"].items():
            gain = [interval(side["alpha"]) for side in (one["before"], one)]
            cost = [f"{one['cost_ratio']:.2f}", interval(one["acceptance_length"], 2)]
            sizes.append([size, at, *gain, one["gamma"], *cost, *speedups(one)])
        drafters.append(f"draft.path={made(TRAIN, *own) / 'draft'}")
    show(
        ["drafter", "T", "alpha before", "after", "K", "c", "tau", "predicted", "measured"], *sizes
    )

    given = ("evaluate.draft=given", "evaluate.temperatures=[0.0]")
    rows: list[list[object]] = []
    folders: dict[int, Path] = {}  # of the last drafter, the best one
    for index, (size, drafter) in enumerate(zip(DRAFTERS, drafters, strict=True)):
        for k in GAMMAS:
            ways = (drafter, *given, f"name=t5_{index}_{k}", f"decode.gamma={k}")
            folders[k] = made(EVALUATE, f"target.path={target}", *ways)
        cells = [speedups(read_json(folder / SUMMARY)) for folder in folders.values()]
        rows.append([size, *map(", ".join, cells)])
    show(["predicted, measured at T = 0", *(f"K = {k}" for k in GAMMAS)], *rows)

    traces = {f"{k} proposals": calls(folders[k], "given") for k in TRACED}
    draw(traces | {"no drafter": calls(folders[TRACED[0]], PLAIN)}, root / "calls.svg")
    print(f"The calls of one answer to scale: {root / 'calls.svg'}\n")

    given = ("evaluate.draft=given", "evaluate.temperatures=[1.0]", "decode.gamma=3")
    rows = []
    for proposer in COUNTED:
        ways = (f"name=t5_{proposer}", f"decode.proposer={proposer}")
        one = summary(EVALUATE, drafters[0], *given, *ways)
        rows.append([proposer, *map(interval, (one["alpha_decoding"], one["acceptance_length"]))])
    show(["proposals from counts, T = 1", "accepted of those tested", "tau"], *rows)

    rows = []
    for divergence in DIVERGENCES:
        how = (f"name=t5_{divergence}", f"divergence={divergence}", "source=draft")
        gains = summary(EVALUATE, *DRAFTERS[ONE_OF_THEM], *how)["by_temperature"]
        rows.append([divergence, *(interval(one["alpha_gain"]) for one in gains.values())])
    named = f"{ONE_OF_THEM}, learning on its own samples"
    show([named, "alpha gained, T = 0", "T = 1"], *rows)

    ways = (f"target.path={target}", drafters[2], "name=t5_peers", "decode.gamma=3")
    ways += ("decode.compile=auto",)  # as pairs are served
    rows = [*beside_hugging_face(compose_config([*text, *ways, *overrides]))]
    show(
        [
            "greedy, the target's first decoder layer, K = 3",
            "tokens/s",
            "ours with the drafter over it",
        ],
        *rows,
    )


if __name__ == "__main__":
    run(sys.argv[1:])
