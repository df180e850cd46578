"""`python -m pipelines.evaluate`: is the draft worth deploying? Numbers with intervals, a verdict.

Judges the drafter that `distill` made beside the one it started from (`evaluate.draft=trained`),
or `draft.path` alone (`evaluate.draft=given`), on held-out prompts: alpha in three acceptance
modes, real speculative decoding timed in turns with its baseline, losslessness, a verdict.
"""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftkit.artifacts import read_json, write_json, write_text
from draftkit.config import MIN_CHUNKS, Config, ModelConfig
from draftkit.data.prompts import read_splits
from draftkit.decoding.trace import html, terminal
from draftkit.evaluation.judge import Evidence, Prompts, check_lossless, compare, gather
from draftkit.evaluation.report import evaluation_table
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, load_target, with_path
from pipelines.contexts import contexts, read_contexts
from pipelines.inputs import check_pair, pair_and_text
from pipelines.plan import Given, StageFolder, Step
from pipelines.run import stage
from pipelines.texts import training_texts
from pipelines.train import train

TRACES = 4
PROMPTS = "prompts.json"  # scores of every prompt, so that runs can be paired


def judged_inputs(config: Config) -> dict[str, Given | Step]:
    """The pair, the text, and the trained drafter where that is the one to judge."""
    inputs = pair_and_text(config)
    if config.evaluate.draft == "trained":
        inputs["trained"] = train.step(config)
    return inputs


def drafts_of(config: Config, folder: StageFolder) -> dict[str, ModelConfig]:
    """The drafts to judge by name, the one that the summary is about last."""
    start = folder.model(config, "draft")
    if config.evaluate.draft == "given":
        return {"given": start}
    return {"before": start, "after": with_path(start, folder.input("trained"))}


def contexts_of(config: Config) -> dict[float, Step]:
    """The contexts of every temperature to judge, the prompts' own first."""
    return {
        temperature: contexts.step(
            replace(config, sampling=replace(config.sampling, temperature=temperature))
        )
        for temperature in (
            config.sampling.temperature,
            *(config.evaluate.temperatures or []),
        )
    }


def needs(config: Config) -> dict[str, Given | Step]:
    """What is judged, and the target's answers under each temperature."""
    answers = {f"contexts at {t:g}": step for t, step in contexts_of(config).items()}
    return {**judged_inputs(config), **answers}


def check_gamma(config: Config) -> None:
    """Raise ValueError where nothing is proposed, and so nothing can be judged."""
    if config.decode.gamma == 0:
        is_none = config.decode.proposer == "none"
        key, way_out = (
            ("decode.proposer=none", "another one") if is_none else ("decode.gamma=0", "1 or more")
        )
        raise ValueError(f"{key} proposes nothing, so there is no drafter to judge: use {way_out}")


def check(config: Config) -> None:
    """Raise ValueError for what cannot be judged, before anything is made for it."""
    check_gamma(config)
    check_pair(config)


def check_prompts(config: Config, texts: Path) -> None:
    """Raise ValueError where the test split of `texts` is too small for a verdict."""
    available, size = len(read_splits(texts).test), config.evaluate.timing_batch_size
    if available < MIN_CHUNKS * size:
        raise ValueError(
            f"data: {available} held-out prompts, a verdict needs {MIN_CHUNKS * size} "
            f"({MIN_CHUNKS} batches of evaluate.timing_batch_size={size}): give more rows, or "
            "raise data.test_fraction"
        )


def load_all(
    config: Config, folder: StageFolder, dtype: torch.dtype | None = None
) -> tuple[Target, dict[str, Adapter]]:
    """The target and the judged drafts, in `dtype` or the hardware's."""
    target = load_target(folder.model(config, "target"), config.hardware, dtype=dtype)
    drafts = drafts_of(config, folder)
    return target, {name: load_draft(draft, target) for name, draft in drafts.items()}


def log(folder: StageFolder, temperature: float, summary: dict[str, Any], main: Evidence) -> None:
    """One line of metrics, and for W&B a row for each timed prompt."""
    folder.tracker.log(
        "eval",
        round(1000 * temperature),
        {
            "temperature": temperature,
            "alpha": summary["alpha"]["mean"],
            "acceptance_length": summary["acceptance_length"]["mean"],
            "speedup": summary["speedup"]["measured"],
            "speedup_end_to_end": summary["speedup"]["end_to_end"]["mean"],
        },
    )
    columns = ["prompt", "tokens", "rounds", "accepted", "acceptance"]
    rows = [
        [i, len(c.output_ids), c.rounds, c.accepted, c.acceptance_total / max(1, c.tested)]
        for i, c in enumerate(main.timed.completions)
    ]
    folder.tracker.table(f"eval/prompts_at_{temperature:g}", columns, rows)


def write_traces(folder: StageFolder, main: Evidence, target: Target) -> None:
    """Leave the first answers as pages to look at: what was proposed, accepted and corrected."""
    traces = main.timed.completions[:TRACES]

    def decode(ids: list[int]) -> str:
        return str(target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    write_text(folder.path / "trace.html", html(traces, decode, title="Speculative decoding"))
    texts = [terminal(trace, decode, width=80, colour=False) for trace in traces]
    write_text(folder.path / "trace.txt", "\n\n".join(texts) + "\n")


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete evaluation, and where its traces are."""
    console = Console(width=80)
    console.print(evaluation_table(read_json(folder / "summary.json")))
    console.print(f"What was accepted and corrected, token by token: {folder / 'trace.html'}")


def lossless_of(config: Config, folder: StageFolder, prompts: Prompts) -> dict[str, Any]:
    """Greedy decoding with and without the draft, in float32; the models go when it is done."""
    folder.note("losslessness: greedy decoding with and without the draft, in float32")
    target, drafts = load_all(config, folder, dtype=torch.float32)
    return check_lossless(target, drafts, prompts, config)


@stage(
    sections=("seed", "data", "sampling", "decode", "evaluate"),
    needs=needs,
    check=check,
    check_texts=check_prompts,
    after=show,
)
def evaluate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Judge the drafts under every temperature of `evaluate.temperatures`."""
    served = folder.input(f"contexts at {config.sampling.temperature:g}")
    prompts = Prompts(
        test=[record.prompt_ids for record in read_contexts(served, "test")],
        calibration=[record.prompt_ids for record in read_contexts(served, "validation")],
        texts=lambda: training_texts(folder.input("texts")),
    )
    lossless = lossless_of(config, folder, prompts)
    gc.collect()  # models stand in reference cycles: one copy of the target at a time
    target, drafts = load_all(config, folder)
    main = list(drafts)[-1]
    by_temperature: dict[str, dict[str, Any]] = {}
    by_prompt: dict[str, dict[str, Any]] = {}
    for temperature in config.evaluate.temperatures or [config.sampling.temperature]:
        sampling = replace(config.sampling, temperature=temperature)
        answers = folder.input(f"contexts at {temperature:g}")
        evidence = gather(
            target,
            drafts,
            contexts=read_contexts(answers, "test"),
            prompts=prompts,
            sampling=sampling,
            lossless=lossless,
            config=config,
            note=folder.note,
        )
        by_temperature[f"{temperature:g}"] = compare(evidence, main, sampling, config)
        scored = {name: part.scored.as_dict() for name, part in evidence.items()}
        by_prompt[f"{temperature:g}"] = {"contexts": answers.name, **scored}
        log(folder, temperature, by_temperature[f"{temperature:g}"], evidence[main])
        if len(by_temperature) == 1:
            write_traces(folder, evidence[main], target)
    write_json(folder.path / PROMPTS, by_prompt)
    first = next(iter(by_temperature.values()))
    return {**first, "by_temperature": by_temperature}


if __name__ == "__main__":
    evaluate.main()
