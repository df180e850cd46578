"""Fit a drafter on what the other stages have made."""

from draftkit.config import Config
from draftkit.workflow.fitting import Fitted, Job, load_teaching_target
from draftkit.workflow.fitting import fit as fit_job
from draftkit.workflow.sources import TrainingTexts, reads_rollouts
from pipelines.contexts import contexts, read_contexts
from pipelines.generate import generate, read_rollouts
from pipelines.inputs import models
from pipelines.scores import read_scores, read_validation, scores
from pipelines.stage import StageFolder
from pipelines.texts import splits_of


def fit(config: Config, folder: StageFolder) -> Fitted:
    """Train in `folder`, with its texts and held-out answers made first."""
    target, start = models(config)
    scored = scores.ensure(config) if config.generate.top_k > 0 else None
    rollouts = generate.ensure(config) if reads_rollouts(config) else None
    held_out = contexts.ensure(config) if scored is None else scored
    return fit_job(
        Job(
            config=config,
            target=load_teaching_target(target, config.hardware, stored=scored is not None),
            start=start,
            texts=TrainingTexts(
                splits_of(config).train,
                None if rollouts is None else read_rollouts(rollouts),
                None if scored is None else read_scores(scored),
            ),
            validation=(
                read_contexts(held_out, "validation")
                if scored is None
                else read_validation(held_out)
            ),
            folder=folder.path,
            tracker=folder.tracker,
            note=folder.note,
            is_main=folder.is_main,
        )
    )
