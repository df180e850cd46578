"""`python -m pipelines.train`: the drafter with the best validation alpha, in `draft`.

Starts from `draft.path` (or the base drafter of `prepare`) and learns by `divergence` on the
sequences of `source`. All processes of a distributed launch take part.
"""

from itertools import pairwise
from typing import Any

from accelerate import PartialState

from draftkit.config import PARD, Config
from draftkit.data.lengths import shares_cut
from draftkit.data.rollouts import read_parts
from draftkit.data.splits import read_splits
from draftkit.distillation.assembly import (
    check_learning_head,
    load_learner,
)
from draftkit.distillation.fit import fit, with_warmup
from draftkit.distillation.ranks import is_first
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.sources import TrainingTexts, check_source_of_head
from draftkit.models.compatibility import declare_target
from draftkit.models.devices import peak_bytes, resolve_device
from draftkit.models.files import ModelFolder
from draftkit.models.heads import head_class
from draftkit.models.parallel import parallel_of
from draftkit.tracking import FILE_NAME, read_metrics

from .command import main
from .contexts import check_teacher, read_contexts, teaching_target
from .plan import TEXTS, TRAIN
from .prepare import check_pair
from .product import complete_summary, plan
from .stage import StageFolder
from .texts import check_answers

DRAFT = "draft"


def check(config: Config) -> None:
    """Raise ValueError for settings that no single section can refuse."""
    check_pair(config)
    texts = plan(TEXTS, config)
    if complete_summary(texts) is not None:
        check_answers(config, read_splits(texts.path))
    given = None if config.draft.path is None else ModelFolder(config.draft).config
    if config.draft.is_head or (given is not None and head_class(given) is not None):
        if config.generate.top_k and not config.generate.hidden_states:
            raise ValueError(
                f"generate.top_k={config.generate.top_k}: a head reads the target's hidden states: "
                "use generate.hidden_states=true too, or generate.top_k=0"
            )
        check_learning_head(config, given is None or parallel_of(given) is not None)
        check_source_of_head(config)
    check_teacher(config, learns=True)
    _ = config.training_temperature  # which refuses a divergence that has no use when greedy


def train(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Train the starting drafter towards the target."""
    given, config = config, with_warmup(config)
    divergence, draft = config.divergence, folder.model(config, "draft")
    first = min(divergence.warmup_steps or 0, config.optim.max_steps)
    if first and {*divergence.terms} != {"forward_kl"}:
        why = "the drafter was never trained: " * (divergence != given.divergence)
        folder.note(f"{why}the first {first:,} steps are of forward KL")
    share = config.draft.pard.plain_share
    if share and config.draft.kind == PARD and parallel_of(ModelFolder(draft).config) is None:
        why = "the drafter was cut and never trained: " * (config.draft != given.draft)
        folder.note(f"{why}{share:.0%} of the steps teach the first proposal alone, then all")
    temperature, served = config.training_temperature, config.sampling.temperature
    if temperature != served and config.divergence.name != "ce_argmax":
        folder.note(f"the loss is taken at temperature {temperature:g}, served is {served:g}")
    scored = folder.inputs.get("scores")
    rollouts = folder.inputs.get("generate")
    splits = read_splits(folder.inputs["texts"])
    validation = read_contexts(scored or folder.inputs["contexts"], "validation")
    target = teaching_target(config, folder, stored=scored is not None)
    if isinstance(target, RemoteTarget):
        if config.source.name == "fixed":  # what is sampled leaves the engine room
            target.check_room(len(one.token_ids) for one in splits.train)
        validation = target.scored(validation)
        folder.note(target.tail_line(validation, temperature))
    fitted = fit(
        config,
        target=target,
        draft=load_learner(draft, target),
        texts=TrainingTexts(
            splits.train,
            splits.room,
            read_parts(rollouts) if rollouts else None,
            read_parts(scored) if scored else None,
        ),
        validation=validation,
        folder=folder.path,
        tracker=folder.tracker,
        note=folder.note,
    )
    if is_first():
        declare_target(fitted.draft.model.config, folder.digests["target"])
        fitted.save(folder.path / DRAFT)
    PartialState().wait_for_everyone()  # the group is left only when the drafter is saved
    outcome, lines = fitted.outcome, read_metrics(folder.path / FILE_NAME)
    if outcome.best_step == 0:
        folder.note("no step beat the starting drafter on validation: it is kept as it was")
    summary: dict[str, Any] = {
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "best_step": outcome.best_step,
        "tokens_per_second": mean_pace(lines),
        "peak_memory_bytes": peak_bytes(resolve_device(config.hardware)),
        "divergence": config.divergence.name,
        "source": config.source.name,
        **shares_cut(splits.counts),
    }
    # The most by which stored scores may have understated validation alpha.
    if bounds := [line["alpha_error_bound"] for line in lines if "alpha_error_bound" in line]:
        summary["alpha_error_bound"] = bounds[-1]
    return summary


def mean_pace(lines: list[dict[str, Any]]) -> float:
    """Generated tokens trained on per second, sampling included, over all logged steps."""
    steps = [line for line in lines if line["section"] == "train"]
    counts = pairwise([0, *(line["total_tokens"] for line in steps)])
    paces = (line["tokens_per_second"] for line in steps)  # in which no time between kills is
    seconds = sum((b - a) / pace for (a, b), pace in zip(counts, paces, strict=True))
    return steps[-1]["total_tokens"] / seconds


if __name__ == "__main__":
    main(TRAIN)
