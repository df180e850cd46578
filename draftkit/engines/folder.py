"""A drafter as a folder: what vLLM, SGLang, transformers and converters load as it is.

Engines compare the widths of the logits, the tokenizers and the contexts of both models, and refuse
a drafter or cap the target where they differ. So the folder has as many embedding rows as the
target, the target's tokenizer byte for byte, the target's context where positions allow it, and no
adapter. It knows no engine. On the hub it is one commit: card, weights and tokenizer.

Rows: those of embeddings and head. The real vocabulary is what the tokenizer has ids for; rows
beyond it are padding.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftkit.artifacts import atomic_path, first_line
from draftkit.config import DraftConfig, HardwareConfig, TargetConfig
from draftkit.models.files import (
    CARD,
    MODEL_FILES,
    TOKENIZER_FILES,
    VOCABULARIES,
    ModelFolder,
    end_of_text_ids,
)
from draftkit.models.head_files import LAYER_IDS
from draftkit.models.heads import head_class
from draftkit.models.loading import Outline, load_draft, load_sharing, load_target
from draftkit.models.lora import save_plain
from draftkit.models.shapes import context_of, rope_types
from draftkit.models.vocabulary import fit_rows, real_vocab_size, untie

# Of these the frequencies of positions do not depend on `max_position_embeddings`.
FREE_ROPE = ("default", "linear", "llama3")


def write_folder(
    draft: DraftConfig,
    target: TargetConfig,
    folder: Path,
    *,
    gamma: int,
    dtype: str | None = None,
    untied: bool = False,
    owner: Outline | None = None,
) -> list[str]:
    """`write_head_folder` of a head, of any other drafter `write_plain_folder`."""
    if head_class(ModelFolder(draft).config) is not None:
        return write_head_folder(draft, target, folder, dtype=dtype, owner=owner)
    return write_plain_folder(draft, target, folder, gamma=gamma, dtype=dtype, untied=untied)


def write_plain_folder(
    draft: DraftConfig,
    target: TargetConfig,
    folder: Path,
    *,
    gamma: int,
    dtype: str | None = None,
    untied: bool = False,
) -> list[str]:
    """Write `draft` to `folder` as engines want it beside `target`; what there is to know of it.

    gamma: proposals a round, in its generation_config.json. dtype: of the weights, None for that in
    which they are stored. untied: the head is in the file where it is the embeddings, too: one that
    is not there stays as it was in an engine that runs. Over the real vocabulary, or the ids that
    the drafter proposes, logits stay as they are, but for the rounding of another dtype. Raises
    ValueError naming `target.path` or `draft.path` for models that cannot be loaded or do not share
    a vocabulary.
    """
    transformers_logging.disable_progress_bar()
    whole = ModelFolder(target)
    shapes, tokenizer = whole.config, whole.tokenizer
    files = tokenizer_files(target)
    stored = "auto" if dtype is None else getattr(torch, dtype)
    own = ModelFolder(draft)
    before = own.config.get_text_config().vocab_size
    model, real, kept_ids = load_sharing(own, tokenizer, dtype=stored, device=torch.device("cpu"))
    rows = shapes.get_text_config().vocab_size
    real_vocab_size(tokenizer, shapes, "target")  # which refuses a target with too few rows
    fit_rows(model, rows=rows, real=real, kept_ids=kept_ids)
    if untied:
        untie(model)
    notes = []
    if before != rows:
        notes.append(f"embeddings and head: {before:,} rows became the target's {rows:,}")
    notes += raise_context(model.config, context_of(shapes))
    if kept_ids is not None:
        notes.append(
            f"the drafter proposes {len(kept_ids):,} ids (draft.shrink.vocabulary, "
            "draft.extra_tokens); engines know no such list: in a head of its own the rows of all "
            "other ids are the mean of these"
        )
    model.generation_config = GenerationConfig(  # what transformers reads of an assistant
        eos_token_id=list(end_of_text_ids(whole.generation, tokenizer)) or None,
        pad_token_id=tokenizer.pad_token_id,
        **assistant_options(gamma),
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, getattr(shapes, name, None))
    with atomic_path(folder) as temporary:
        save_plain(model, temporary)
        for name, file in files.items():
            shutil.copyfile(file, temporary / name)
    return notes


def write_head_folder(
    draft: DraftConfig,
    target: TargetConfig,
    folder: Path,
    *,
    dtype: str | None = None,
    owner: Outline | None = None,
) -> list[str]:
    """`write_plain_folder` of a head on the hidden states of `target`.

    owner: the target, where it is in memory. Engines give the head the target's embeddings, so it
    has none but those of another trainer that differ. Raises ValueError naming `draft.path` for a
    head that engines would read otherwise.
    """
    transformers_logging.disable_progress_bar()
    files, shape = tokenizer_files(target), ModelFolder(draft).config
    stored = getattr(shape, "dtype", None) or torch.float32
    stored = stored if dtype is None else getattr(torch, dtype)
    if owner is None:
        owner = load_target(target, HardwareConfig(device="cpu"), dtype="auto", probed=False)
    model: Any = load_draft(draft, owner, dtype=stored).model
    notes = raise_context(model.config, context_of(ModelFolder(target).config))
    for name in (*LAYER_IDS, "eagle_config"):  # which engines read by different keys
        vars(model.config).pop(name, None)
    if hasattr(model, "embed_tokens"):
        notes.append("the head has embeddings of its own; SGLang takes the target's instead")
    with atomic_path(folder) as temporary:
        save_plain(model, temporary)
        for name, file in files.items():
            shutil.copyfile(file, temporary / name)
    return notes


def upload(folder: Path, repository: str) -> str:
    """Upload the model in `folder`, and its card, to `repository`, made private where it is new.

    Nothing else: what lies beside it names folders of this machine.

    Returns the address of the commit. The token is that of `hf auth login` or HF_TOKEN. Raises
    ValueError naming `export.push_to_hub` where the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[*MODEL_FILES, CARD],
            commit_message="A draft model for speculative decoding",
        )
    except (HFValidationError, OSError, HTTPError) as error:
        reason = first_line(error)[:200].rstrip(".")
        raise ValueError(
            f"export.push_to_hub={repository}: {reason}: log in with `hf auth login`, or leave "
            "it out: the folder is written without it"
        ) from error
    return commit.commit_url


def tokenizer_files(target: TargetConfig) -> dict[str, Path]:
    """The files of the target's tokenizer, by name. Raises ValueError where there are none."""
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    options["revision"] = target.revision
    files = {name: cached_file(target.location, name, **options) for name in TOKENIZER_FILES}
    held = {name: Path(file) for name, file in files.items() if file is not None}
    if not held.keys() & VOCABULARIES:
        raise ValueError(
            f"target.path {target.path}: holds no tokenizer file ({', '.join(VOCABULARIES)}): "
            "save the tokenizer into the folder with save_pretrained"
        )
    return held


def raise_context(config: PreTrainedConfig, context: int) -> list[str]:
    """Raise the context of `config` to `context` tokens where its positions allow; what to know.

    Rotary positions without a scaling that counts on the context go on beyond it; learned ones end.
    """
    text, own = config.get_text_config(), context_of(config)
    if own >= context:
        return []
    kinds = rope_types(text)
    if kinds and all(kind in FREE_ROPE for kind in kinds):
        text.max_position_embeddings = context
        return [
            f"context raised from {own:,} to the target's {context:,} tokens; the drafter has "
            f"learnt nothing of positions beyond {own:,}, so expect less acceptance there"
        ]
    why = f"rope scaling {', '.join(kinds)} counts on it" if kinds else "its positions are learnt"
    return [
        f"context stays {own:,} of the target's {context:,} tokens ({why}): engines cap texts at "
        f"it or refuse the drafter"
    ]


def assistant_options(gamma: int) -> dict[str, Any]:
    """With what `generation_config.json` an assistant proposes `gamma` tokens in every round."""
    return {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
