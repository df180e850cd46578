"""From a configuration and models in memory to a trainer: what the draft learns by, and from whom.

Commands, the daemon and the library make their trainers here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.config import (
    PARD,
    PLAIN,
    Config,
    DraftConfig,
    HardwareConfig,
    OptimConfig,
    TargetConfig,
)
from draftkit.distillation.losses import (
    Objective,
    RemoteTeacher,
    StoredTeacher,
    TargetTeacher,
    Teacher,
)
from draftkit.distillation.ranks import join_group
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import Adapter
from draftkit.models.heads import EAGLE3
from draftkit.models.loading import (
    Outline,
    Target,
    load_draft,
    load_outline,
    load_target,
)
from draftkit.models.lora import with_lora
from draftkit.models.parallel import Parallel, check_unused, declare, free_id
from draftkit.models.probe import check_packing
from draftkit.models.sharding import load_sharded_target
from draftkit.theory.divergences import Divergence


def load_teaching_target(
    target: TargetConfig, hardware: HardwareConfig, *, stored: bool, framed: bool = False
) -> Outline:
    """The target to learn from, its outline alone where its scores are `stored` with the texts; it
    is `framed` where these hold its hidden states.

    Split over the processes of a distributed launch where `hardware.shard_target` says so.
    """
    if stored:
        return load_outline(target, hardware, framed=framed)
    if not hardware.shard_target:
        return load_target(target, hardware)
    join_group()
    return load_sharded_target(target, hardware)


def load_learner(draft: DraftConfig, target: Outline) -> Adapter:
    """The draft to begin with, in float32; one of `draft.kind=pard` may be a plain one yet."""
    return load_draft(replace(draft, kind=PLAIN), target, dtype=torch.float32)


def make_trainer(
    config: Config,
    draft: Adapter,
    target: Outline,
    *,
    optim: OptimConfig | None = None,
    loss: Divergence | None = None,
    texts: Iterable[Sequence[int]] = (),
) -> Trainer:
    """A trainer of `draft`, in float32, with all that the section `draft` says of how it learns.

    The draft is changed in place. It learns from `target`, or from scores that are stored with its
    texts where that has no weights. loss: minimised instead of `divergence.name`. texts: none
    of which may use the id of the masks, where the draft is a parallel one.
    """
    if draft.reads:
        in_one_pass = draft.parallel is not None
        check_learning_head(config, in_one_pass)
        if config.draft.kind == EAGLE3:  # which learns chains as long as `draft.head` says
            head: Any = draft
            options = config.draft.head
            draft = head.taught(options.tokens if in_one_pass else options.steps)
    # One that proposes in one pass already, as the daemon's does, has that behind it.
    plain_share = 0.0 if draft.parallel else config.draft.pard.plain_share or 0.0
    if config.draft.kind == PARD and not draft.reads:
        draft = made_parallel(draft, config.draft.pard.tokens, target.tokenizer, texts)
    if draft.parallel is not None:
        check_unused(draft.parallel, texts)
    draft = with_lora(draft, config.draft.lora, seed=config.seed)
    if config.optim.activation_checkpointing:
        checkpoint_activations(draft.model)
    divergence = config.divergence
    teacher: Teacher | None = None
    if loss is not None or divergence.names != {"next_token"} or draft.reads:
        teacher = StoredTeacher()
        if isinstance(target, Target):
            teacher = TargetTeacher(target.adapter)
        elif isinstance(target, RemoteTarget):
            teacher = RemoteTeacher(target, config.training_temperature)
    return Trainer(
        draft,
        teacher,
        Objective(
            divergence,
            config.sampling,
            config.training_temperature,
            compiled=config.optim.compiles,
            own=loss,
        ),
        optim=optim or config.optim,
        autocast=target.dtype if target.dtype != torch.float32 else None,
        seed=config.seed,
        plain_share=plain_share,
    )


def check_learning_head(config: Config, in_one_pass: bool) -> None:
    """Raise ValueError for what a head, which may be one that proposes `in_one_pass`, cannot do."""
    saves, parallel = config.optim.activation_checkpointing, config.draft.head.parallel
    for key, value, rule in (
        ("draft.lora.rank", config.draft.lora.rank, "0: a head is small, and learns whole"),
        ("optim.activation_checkpointing", saves, "false: a head has one layer"),
        (
            "draft.head.parallel",
            parallel and not in_one_pass,
            "false, since draft.path proposes token by token; leave draft.path out to begin anew",
        ),
    ):
        if value:
            raise ValueError(f"{key}={str(value).lower()} must be {rule}")


def made_parallel(
    draft: Adapter, blocks: int, tokenizer: PreTrainedTokenizerBase, texts: Iterable[Sequence[int]]
) -> Adapter:
    """`draft` as one that proposes `blocks` tokens in one pass; the id of its masks, if it has one,
    stays. ValueError where the vocabulary has none to give, or rows of it cannot be packed."""
    check_packing(draft, "draft.kind=pard")
    token = None if draft.parallel is None else draft.parallel.token
    if token is None:
        rows: Any = draft.model.get_input_embeddings()
        token = free_id(tokenizer, len(rows.weight), texts)
    declare(draft.model.config, Parallel(token, blocks))
    return draft.rebuilt()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass of `model` make its activations again instead of keeping them."""
    # Later transformers have another name for it, and warn of the older.
    name = "activation_checkpointing_enable"
    enable: Any = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
