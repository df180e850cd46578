"""`python -m pipelines.measure_engine engine.url=http://127.0.0.1:8000`: predicted and counted.

Sends the held-out prompts of `evaluate` to a server of vLLM, SGLang or llama.cpp that runs with the
drafter and has no other client, one at a time under the served sampling. Prints the tokens a pass
that it counts beside those that the target's own answers predict at its gamma, and its tokens a
second. Starts no engine. OPENAI_API_KEY is sent where it is set.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.data.rollouts import Record
from draftkit.endpoint import Endpoint
from draftkit.engines.counters import LLAMACPP, SGLANG, Answer, Server
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.engines import SETTINGS, EngineSetting, drafted_as
from draftkit.evaluation.intervals import acceptance_length, estimate
from draftkit.models.loading import load_draft, load_target
from draftkit.templates import interval, signed
from draftkit.theory.acceptance import Rate

from .command import main
from .contexts import read_contexts
from .evaluate import drafter_of
from .plan import MEASURE_ENGINE, answer_tokens
from .product import SUMMARY
from .stage import StageFolder


@contextmanager
def connected(config: Config) -> Iterator[Server]:
    """The server. Raises ValueError where none is named, or it cannot be measured."""
    if config.engine.url is None:
        raise ValueError("engine.url: name the server that runs, as http://127.0.0.1:8000")
    with Endpoint("engine.url", config.engine.url) as endpoint:
        yield Server(endpoint)


def check(config: Config) -> None:
    """Raise ValueError for a server that cannot be measured, before anything is made for it."""
    with connected(config):
        pass


def scored(
    config: Config, folder: StageFolder, texts: list[Record], server: Server
) -> PromptTotals:
    """The drafter on the target's answers, but for their first tokens, which no pass proposes.

    `cut` are those behind whose end the engine counts what it accepts.
    """
    target = load_target(folder.model(config, "target"), config.hardware)
    draft = load_draft(drafter_of(config, folder), target)
    totals = score_drafts(
        target.adapter,
        {"draft": draft},
        texts,
        sampling=config.sampling,
        batch_size=config.evaluate.batch_size,
        eos_token_ids=target.eos_token_ids,
        blocks=server.gamma,
    )["draft"]
    assert totals.cut is not None
    counts = ~totals.cut if server.engine == LLAMACPP else totals.cut | True
    shares = {mode: [one[1:] for one in each] for mode, each in totals.shares.items()}
    return replace(totals, shares=shares, cut=counts & (server.engine != SGLANG))


def row(setting: EngineSetting, totals: PromptTotals, answers: list[Answer], gamma: int) -> Any:
    """What one way to draft predicts, and how the counts differ from it, paired by document."""
    totals, mode = drafted_as(setting, totals)
    counts = Rate.of((one.passes + one.accepted, one.passes) for one in answers)
    rates = counts, totals.tokens_a_pass(mode, gamma)
    both = (counts.counts > 0) & (rates[1].counts > 0)
    documents = [one for one, kept in zip(totals.documents, both, strict=True) if kept]
    counted, predicted = (Rate(r.totals[both], r.counts[both], documents) for r in rates)
    difference = estimate(counted, predicted, compare=operator.sub)
    return {
        "drafts": setting.name,
        "predicted": acceptance_length(predicted, gamma).as_dict(),
        "counted": acceptance_length(counted, gamma).as_dict(),
        "difference": difference.as_dict(),
        "differs": None if difference.ci95 is None else difference.excludes(0),
    }


def show(config: Config, folder: Path) -> None:
    """Print what a complete measurement counted, beside what each way to draft predicts."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    console.print(
        f"{summary['engine']} at gamma {summary['gamma']}, {summary['prompts']} prompts: "
        f"{interval(summary['counted'], 2)} tokens a pass; {summary['tokens_per_second']:.1f} "
        "tokens a second, one request at a time"
    )
    for one in summary["rows"]:
        relation = {None: "beside", True: "DIFFERS from", False: "agrees with"}[one["differs"]]
        console.print(
            f"counted {relation} what {one['drafts']} drafts predict, "
            f"{interval(one['predicted'], 2)}: {signed(one['difference'])}"
        )


def measure_engine(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Count on the server, predict at its gamma, and compare."""
    texts, limit = read_contexts(folder.inputs["contexts"], "test"), answer_tokens(config)
    prompts = [record.prompt_ids for record in texts]
    with connected(config) as server:
        folder.note(f"{len(prompts)} prompts to {server.engine}, one at a time")
        how: dict[str, Any] = {"sampling": config.sampling, "limit": limit, "seed": config.seed}
        server.answers(prompts[:1], **how)  # what compiles does so now
        answers = server.answers(prompts, **how)
        if server.gamma == 0:
            raise server.failure("drafts nothing: start it with the drafter")
    totals = scored(config, folder, texts, server)
    settings = [one for one in SETTINGS if one.engine == server.engine]
    rows = [row(one, totals, answers, server.gamma) for one in settings]
    return {
        "engine": server.engine,
        "gamma": server.gamma,
        "prompts": len(prompts),
        "counted": rows[0]["counted"],
        "rows": rows,
        "tokens_per_second": sum(a.tokens for a in answers) / sum(a.seconds for a in answers),
    }


if __name__ == "__main__":
    main(MEASURE_ENGINE)
