"""`python -m pipelines.evaluate`: is the draft worth deploying? Numbers with intervals, a verdict.

Judges the drafter that `distill` made beside the one it started from (`evaluate.draft=trained`),
or `draft.path` alone (`evaluate.draft=given`), on held-out prompts: alpha in three acceptance
modes, real speculative decoding timed in turns with its baseline, losslessness, a verdict.
With `certify` it compares two servers instead, and judges no drafter (`certify.py`).
"""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import machine, provenance, read_json, write_json, write_text
from draftkit.config import PLAIN, Config, DraftConfig
from draftkit.data.lengths import shares_cut
from draftkit.data.rollouts import document_of
from draftkit.data.splits import read_splits
from draftkit.decoding.trace import answers, as_rows, as_text
from draftkit.evaluation.alpha import score_stored
from draftkit.evaluation.engines import serves
from draftkit.evaluation.lossless import LOSSY, NOT_CHECKED
from draftkit.evaluation.measure import Measured, Prompts, check_lossless, gather
from draftkit.evaluation.page import REPORT, as_html, decision_page, write_page
from draftkit.evaluation.report import (
    bounds_table,
    engine_table,
    evaluation_table,
    numbers_table,
    ways_table,
)
from draftkit.evaluation.summary import bounded, compare
from draftkit.evaluation.walltime import Timed
from draftkit.models.adapter import Adapter
from draftkit.models.head_files import kind_of
from draftkit.models.loading import Target, load_draft, load_target, with_path
from draftkit.tracking import Tracker

from .certify import DIFFERENT
from .command import launch, main
from .contexts import check_teacher, read_contexts, teacher_of
from .plan import CERTIFY, EVALUATE, answer_tokens, at_temperatures
from .prepare import check_pair
from .product import SUMMARY
from .stage import StageFolder

TRACES, WIDTH = 3, 80  # cells of a line
TRACE = "trace.json"  # the first answers, round by round
SAMPLES = {True: "samples.ansi", False: "samples.txt"}  # as read: with colours, with marks
PROMPTS = "prompts.json"  # scores of every prompt, so that runs can be paired
TIMING = "timing.json"  # seconds and tokens of every chunk, by way


def drafter_of(config: Config, folder: StageFolder) -> DraftConfig:
    """The drafter that is judged: the one that was trained where `evaluate.draft` says so."""
    start = folder.model(config, "draft")
    return with_path(start, folder.inputs["train"]) if "train" in folder.inputs else start


def drafts_of(config: Config, folder: StageFolder) -> dict[str, DraftConfig]:
    """The drafts to judge by name, the one that the summary is about last."""
    judged = drafter_of(config, folder)
    if config.evaluate.draft == "given":
        return {"given": judged}
    # As it is: `distill` alone makes a parallel one of it.
    return {"before": replace(folder.model(config, "draft"), kind=PLAIN), "after": judged}


def check(config: Config) -> None:
    """Raise ValueError for what cannot be judged, before anything is made for it."""
    if config.proposals == 0:
        key, way_out = "decode.gamma=0", "1 or more"
        if config.decode.proposer == "none":
            key, way_out = "decode.proposer=none", "another one"
        raise ValueError(f"{key} proposes nothing, so there is no drafter to judge: use {way_out}")
    check_pair(config)
    check_teacher(config, learns=False)


def prompts_in(folder: StageFolder, answers: Path) -> Prompts:
    """The prompts of the contexts in `answers`, with the training texts of `folder`."""
    test, validation = (read_contexts(answers, split) for split in ("test", "validation"))
    texts = folder.inputs["texts"]
    # Read only where a proposer counts them.
    return Prompts(
        test=[record.prompt_ids for record in test],
        calibration=[record.prompt_ids for record in validation],
        documents=[document_of(record) for record in test],
        texts=lambda: (example.token_ids for example in read_splits(texts).train),
    )


def track(tracker: Tracker, temperature: float, summary: dict[str, Any], timed: Timed) -> None:
    """One line of metrics, and for W&B a row for each timed prompt."""
    speedup = summary["speedup"]
    numbers = {name: summary[name]["mean"] for name in ("alpha", "acceptance_length")}
    numbers |= {"temperature": temperature, "speedup": speedup["measured"]}
    numbers["speedup_end_to_end"] = speedup["end_to_end"]["mean"]
    tracker.log("eval", round(1000 * temperature), numbers)
    columns = ["prompt", "tokens", "rounds", "accepted", "acceptance"]
    rows = [
        [i, len(c.output_ids), c.rounds, c.accepted, c.acceptance_total / max(1, c.tested)]
        for i, c in enumerate(timed.completions)
    ]
    tracker.table(f"eval/prompts_at_{temperature:g}", columns, rows)


def chunks_of(measured: Measured) -> dict[str, Any]:
    """Every chunk of every way, in the order of the clock."""
    return {
        name: {
            "gamma": one.gamma,
            **one.hybrid,
            "prefill_seconds": [chunk.prefill_seconds for chunk in one.chunks],
            "seconds": [chunk.seconds for chunk in one.chunks],
            "tokens": [chunk.tokens for chunk in one.chunks],
            "rounds": [sum(each.rounds for each in chunk.completions) for chunk in one.chunks],
        }
        for name, one in measured.timed.items()
    }


def write_traces(folder: Path, timed: Timed, target: Target) -> None:
    """Leave the first answers to look at: what was proposed, accepted and corrected."""
    traces = timed.completions[:TRACES]

    def detokenize(ids: list[int]) -> str:
        return str(target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    write_json(folder / TRACE, [as_rows(trace, detokenize) for trace in traces])
    for colour, name in SAMPLES.items():
        read = answers(traces, detokenize, width=WIDTH, marks=not colour)
        write_text(folder / name, as_text(read, width=WIDTH, colour=colour))


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete evaluation, and where its traces are."""
    console = Console(width=80)
    summary = read_json(folder / SUMMARY)
    if "ways" not in summary:
        return console.print(bounds_table(summary))
    console.print(evaluation_table(summary))
    if "speedup_by_k" in summary:
        console.print(numbers_table(summary))
    if "engines" in summary:
        console.print(engine_table(summary))
    console.print(ways_table(summary))
    console.print(f"All of it on a page, with figures and texts: {folder / REPORT}")
    return None


def evaluate_by_engine(config: Config, folder: StageFolder) -> dict[str, Any]:
    """What is sure of the drafts where engines alone score the target's answers.

    Alpha and tokens a pass count what both surely give to the ids that are named, with the most
    that may be missing beside them. Nothing is decoded and timed here, so the verdict stays open.
    """
    target, models = teacher_of(config, folder), drafts_of(config, folder)
    drafts = {name: load_draft(one, target) for name, one in models.items()}
    answers = [path for name, path in folder.inputs.items() if name.startswith("contexts")]
    by_temperature: dict[str, dict[str, Any]] = {}
    by_prompt: dict[str, dict[str, Any]] = {}
    for one, path in zip(at_temperatures(config), answers, strict=True):
        temperature = one.sampling.temperature
        contexts = target.scored(read_contexts(path, "test"))
        folder.note(target.tail_line(contexts, temperature or 1.0))
        how: Any = {"sampling": one.sampling, "batch_size": config.evaluate.batch_size}
        judged = {
            name: score_stored(draft, contexts, tails_known=False, **how)
            for name, draft in drafts.items()
        }
        by_temperature[f"{temperature:g}"] = bounded(judged, config) | {"temperature": temperature}
        scored = {name: totals.as_dict() for name, (totals, _) in judged.items()}
        by_prompt[f"{temperature:g}"] = {"contexts": path.name, **scored}
    write_json(folder.path / PROMPTS, by_prompt)
    kind = kind_of(next(reversed(drafts.values())).model.config)
    first = next(iter(by_temperature.values()))
    return {**first, "by_temperature": by_temperature, "kind": kind}


def evaluate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Judge the drafts under every temperature of `evaluate.temperatures`."""
    if config.scored_by_engine:
        return evaluate_by_engine(config, folder)
    options = replace(config.evaluate, max_new_tokens=answer_tokens(config))
    config = replace(config, evaluate=options)
    answers = [path for name, path in folder.inputs.items() if name.startswith("contexts")]
    prompts = prompts_in(folder, answers[0])
    target = load_target(folder.model(config, "target"), config.hardware)
    models = drafts_of(config, folder)
    judged, checked = [*models][-1], dict(models)
    if config.draft.is_untrained:  # nobody would serve it, and it takes longest to check
        checked.pop("before", None)
    unchecked = LOSSY if config.decode.is_lossy else NOT_CHECKED
    lossless = dict.fromkeys(models, unchecked)
    lossless |= check_lossless(target, checked, prompts, config, folder.note)
    gc.collect()  # models stand in reference cycles: one copy of each draft at a time
    drafts: dict[str, Adapter] = {name: load_draft(one, target) for name, one in models.items()}
    kind = kind_of(drafts[judged].model.config)
    by_temperature: dict[str, dict[str, Any]] = {}
    by_prompt: dict[str, dict[str, Any]] = {}
    by_chunk: dict[str, dict[str, Any]] = {}
    for one, path in zip(at_temperatures(config), answers, strict=True):
        sampling, key = one.sampling, f"{one.sampling.temperature:g}"
        measured = gather(
            target,
            drafts,
            contexts=read_contexts(path, "test"),
            others=read_contexts(path, "validation"),
            prompts=prompts,
            sampling=sampling,
            lossless=lossless,
            config=config,
            note=folder.note,
        )
        if not by_temperature:
            write_traces(folder.path, measured.timed[judged], target)
        computes = machine(gpu=target.adapter.device.type == "cuda")
        by_temperature[key] = compare(measured, judged, sampling, config) | {"machine": computes}
        if rows := by_temperature[key].get("engines"):
            by_temperature[key]["engines"] = [r for r in rows if serves(r["engine"], kind)]
        scored = {name: totals.as_dict() for name, totals in measured.scored.items()}
        by_prompt[key] = {"contexts": path.name, **scored}
        by_chunk[key] = chunks_of(measured)
        track(folder.tracker, sampling.temperature, by_temperature[key], measured.timed[judged])
    write_json(folder.path / PROMPTS, by_prompt)
    write_json(folder.path / TIMING, by_chunk)
    first = next(iter(by_temperature.values()))
    if (kept := getattr(drafts[judged], "kept_ids", None)) is not None:
        first["kept_ids"] = len(kept)
    shares = shares_cut(read_splits(folder.inputs["texts"]).counts)
    summary = {**first, "by_temperature": by_temperature, "kind": kind, **shares}
    page = decision_page(
        summary,
        name=config.name,
        traces=read_json(folder.path / TRACE),
        provenance={**provenance(), "inputs": folder.digests},
    )
    write_page(folder.path, page)
    folder.tracker.report(as_html(page | {"traces": ()}))
    return summary


def run(config: Config) -> None:
    """The command. Ends the process with code DIFFERENT for servers that are not certified."""
    if launch(CERTIFY if config.certify else EVALUATE, config).get("certified") is False:
        raise SystemExit(DIFFERENT)


if __name__ == "__main__":
    main(EVALUATE, run)
