"""From a configuration to models in memory: weights, tokenizer, the pair.

Loads what `save_pretrained` wrote, safetensors only, and refuses with one line what it cannot
load whole (Hugging Face would fill missing weights with random numbers). It knows no prompts, no
losses, no decoding.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftkit.artifacts import atomic_path
from draftkit.config import PARD, PLAIN, DraftConfig, HardwareConfig, ModelConfig, TargetConfig
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.attention import fit_to_device
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.files import (
    KEPT_IDS,
    WHOLE,
    ModelFolder,
    auto_model,
    check_weights,
    refusing,
    unread,
)
from draftkit.models.head_files import kind_of_head, load_head
from draftkit.models.heads import HEADS, head_class, layers_read
from draftkit.models.lora import save_plain
from draftkit.models.parallel import parallel_of
from draftkit.models.probe import check_packing, check_passes
from draftkit.models.rounded import LEVELS, pack, round_weights
from draftkit.models.seq2seq import Seq2SeqAdapter
from draftkit.models.shapes import layer_count, layer_stack
from draftkit.models.shrink import read_kept_ids
from draftkit.models.vocabulary import check_same_tokenizer, count_ids, fit_rows, real_vocab_size

Model = TypeVar("Model", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A target without its weights: what a draft of it must share.

    eos_token_ids: that end its texts. dtype: of both models as they are served. frame: the target
    with no weights but its embeddings, beside which a head is loaded.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    frame: Adapter | None = None


@dataclass(frozen=True, kw_only=True)
class Target(Outline):
    """A target with its weights."""

    adapter: Adapter


def weight_count(config: PreTrainedConfig) -> int:
    """Weights of a model of that configuration, tied ones once; none are made."""
    head: Any = head_class(config)
    with torch.device("meta"):
        model = auto_model(config).from_config(config) if head is None else head(config)
    return sum(weight.numel() for weight in model.parameters())


def load_model(
    model: ModelConfig | ModelFolder,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
) -> PreTrainedModel:
    """Load a language model for inference, in `dtype` (`auto`: as stored) on `device`, dropout off.

    Raises ValueError naming the model's key for a missing, corrupt or incomplete one.
    """
    transformers_logging.disable_progress_bar()
    folder = model if isinstance(model, ModelFolder) else ModelFolder(model)
    model, name = folder.model, folder.model.named
    check_weights(model)
    remedy, quantised = WHOLE, getattr(folder.config, "quantization_config", None)
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method")
        remedy = f"it is quantised by {method}: install what reads that, or give it unquantised"
    # Read to where they stay, and not through the host's memory.
    options: dict[str, Any] = {"device_map": device} if device.type == "cuda" else {}
    with refusing(model, remedy=remedy):
        loaded, report = auto_model(folder.config).from_pretrained(
            model.location,
            config=folder.config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **folder.source,
            **options,
        )
    absent = sorted([*report["missing_keys"], *report["mismatched_keys"]], key=str)
    if absent:
        raise ValueError(
            f"{name}: {len(absent)} weights are missing or of another shape (first: {absent[0]}): "
            f"{WHOLE}"
        )
    if left := unread(loaded, report["unexpected_keys"]):
        raise ValueError(
            f"{name}: {len(left)} weights have no place in the model of its config.json (first: "
            f"{left[0]}), which would be another model without them: {WHOLE}"
        )
    return loaded.to(device).eval()


def adapter_of(
    model: PreTrainedModel, *, vocab_size: int, kept_ids: Tensor | None = None
) -> Adapter:
    """The face of a decoder-only or an encoder-decoder `model`."""
    if model.config.is_encoder_decoder:
        return Seq2SeqAdapter(model, vocab_size=vocab_size, kept_ids=kept_ids)
    return CausalAdapter(fit_to_device(model), vocab_size=vocab_size, kept_ids=kept_ids)


def load_outline(model: TargetConfig, hardware: HardwareConfig, *, framed: bool = False) -> Outline:
    """What `load_target` loads, but the weights; if `framed`, one tensor of them for its `frame`.

    Raises ValueError naming `target.path`, and for a frame of embeddings that are more than that.
    """
    device, folder = resolve_device(hardware), ModelFolder(model)
    outline = Outline(
        tokenizer=folder.tokenizer,
        eos_token_ids=folder.ends,
        dtype=resolve_dtype(hardware, device),
        device=device,
    )
    if not framed:
        return outline
    with torch.device("meta"):
        whole = auto_model(folder.config).from_config(folder.config)
    embeddings: Any = whole.get_input_embeddings()
    if type(embeddings) is not nn.Embedding:
        raise ValueError(
            f"generate.hidden_states: {folder.config.model_type} does more to a token than look it "
            "up: use generate.hidden_states=false and generate.top_k=0"
        )
    name = next(name for name, module in whole.named_modules() if module is embeddings) + ".weight"
    index, file = "model.safetensors.index.json", "model.safetensors"
    find = partial(cached_file, model.location, revision=model.revision)
    with refusing(model):
        parts = find(index, _raise_exceptions_for_missing_entries=False)
        if parts is not None:
            file = json.loads(Path(parts).read_text(encoding="utf-8"))["weight_map"][name]
        with safe_open(str(find(file)), "pt") as stored:
            rows = stored.get_tensor(name).to(outline.device, outline.dtype)
    whole.set_input_embeddings(nn.Embedding.from_pretrained(rows, freeze=True))
    size = real_vocab_size(outline.tokenizer, folder.config, "target")
    return replace(outline, frame=adapter_of(whole, vocab_size=size))


def load_target(
    model: TargetConfig,
    hardware: HardwareConfig,
    *,
    dtype: torch.dtype | Literal["auto"] | None = None,
    probed: bool = True,
) -> Target:
    """Load the target in `dtype` (`auto`: as stored), else the hardware's.

    Logits are cut to the real vocabulary. Raises ValueError naming `target.path` for a model that
    cannot be loaded, or, where it is `probed`, that fails `check_passes`.
    """
    if model.weights != "auto":
        raise ValueError(
            f"target.weights={model.weights}: commands round a target into a folder first: write "
            "one by draftkit.models.loading.save_rounded, and give target.path there"
        )
    device, folder = resolve_device(hardware), ModelFolder(model)
    served, tokenizer = resolve_dtype(hardware, device), folder.tokenizer
    loaded = load_model(folder, dtype=dtype or served, device=device)
    # A target never changes, so compiled code may pack its weights.
    loaded.requires_grad_(False)
    if device.type == "cpu" and (levels := Path(model.location) / LEVELS).is_file():
        with refusing(model):
            pack(loaded, levels)
    size = real_vocab_size(tokenizer, loaded.config, "target")
    adapter = adapter_of(loaded, vocab_size=size)
    if probed:
        check_passes(adapter, model.named)
    return Target(
        tokenizer=tokenizer,
        eos_token_ids=folder.ends,
        dtype=served,
        device=device,
        adapter=adapter,
    )


def load_draft(model: DraftConfig, target: Outline, *, dtype: torch.dtype | None = None) -> Adapter:
    """Load a draft for `target` in `dtype`, else the target's.

    One with a list of kept ids in its folder proposes no others. Raises ValueError for a draft
    that cannot be loaded or does not share the vocabulary.
    """
    dtype, device = dtype or target.dtype, target.device
    folder, name = ModelFolder(model), model.named
    if head_class(folder.config) is not None:
        # Its folder may have no tokenizer. It reads a target, which must be in memory.
        known = target.adapter if isinstance(target, Target) else target.frame
        if known is None:
            raise ValueError(
                f"{name}: a head reads the target's hidden states, and the target is not loaded: "
                "use generate.hidden_states=true, or generate.top_k=0"
            )
        check_kind(model, folder.config)
        return load_head(model, folder.config, known, dtype=dtype)
    loaded, size, kept_ids = load_sharing(folder, target.tokenizer, dtype=dtype, device=device)
    if isinstance(target, Target):
        check_same_shape(target.adapter.model.config, loaded.config)
    check_kind(model, loaded.config)
    adapter = adapter_of(loaded, vocab_size=size, kept_ids=kept_ids)
    check_passes(adapter, name)
    if adapter.parallel is not None:
        check_packing(adapter, name)
    return adapter


def load_sharing(
    folder: ModelFolder,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
) -> tuple[PreTrainedModel, int, Tensor | None]:
    """A draft with a row for each of the V ids of `tokenizer`; V; its `load_kept_ids`."""
    model: Any = folder.model
    own, size = folder.tokenizer, count_ids(tokenizer)
    unshared = check_same_tokenizer(
        target_tokenizer=tokenizer, draft_tokenizer=own, extra_tokens=model.extra_tokens
    )
    loaded = load_model(folder, dtype=dtype, device=device)
    real_vocab_size(own, loaded.config, "draft")
    if (rows := loaded.config.get_text_config().vocab_size) < size:
        fit_rows(loaded, rows=size, real=rows)  # texts may hold what the draft never proposes
    return loaded, size, load_kept_ids(model, size, unshared)


def check_same_shape(target: PreTrainedConfig, draft: PreTrainedConfig) -> None:
    """Raise ValueError for an encoder-decoder model beside a decoder-only one."""
    if target.is_encoder_decoder != draft.is_encoder_decoder:
        kinds = {True: "an encoder-decoder model", False: "a decoder-only one"}
        raise ValueError(
            f"draft.path: {draft.model_type} is {kinds[draft.is_encoder_decoder]}, and the target "
            f"({target.model_type}) {kinds[target.is_encoder_decoder]}: both must be of one kind"
        )


def check_shows_layers(model: DraftConfig, target: PreTrainedConfig) -> None:
    """Raise ValueError for a target of which no head of `draft.kind` can be made."""
    layers_read(model.kind, layer_count(target))
    try:
        with torch.device("meta"):
            layer_stack(auto_model(target).from_config(target))
    except ValueError as error:
        raise ValueError(
            f"draft.kind={model.kind}: {target.model_type} does not show its layers, whose hidden "
            "states a head reads: use draft.kind=plain"
        ) from error


def check_kind(model: DraftConfig, config: PreTrainedConfig, *, learns: bool = False) -> None:
    """Raise ValueError where `draft.kind` asks for another drafter than that of `config`.

    learns: it is to be trained, which makes a parallel drafter of a plain one.
    """
    own = PLAIN if head_class(config) is None else kind_of_head(config)
    if {own, model.kind} & {*HEADS} and model.kind not in (own, PLAIN):
        raise ValueError(
            f"{model.named}: a drafter of the kind {own}, and draft.kind={model.kind}: give "
            f"draft.kind={own}"
        )
    if model.kind == PARD and parallel_of(config) is None and not learns:
        raise ValueError(
            f"{model.named}: a plain drafter (its config.json names no pard_token), and draft.kind="
            "pard proposes in one pass: train one by `distill draft.kind=pard`, or give "
            "draft.kind=plain"
        )


def load_kept_ids(
    model: DraftConfig, vocab_size: int, unshared: Sequence[int] = ()
) -> Tensor | None:
    """The ids [K] that a draft's folder keeps, but the `unshared` ones; None for all.

    Raises ValueError for a damaged list.
    """
    with refusing(model):
        path = cached_file(
            model.location,
            KEPT_IDS,
            revision=model.revision,
            _raise_exceptions_for_missing_entries=False,
        )
    known = max([vocab_size, *(token + 1 for token in unshared)])
    kept = torch.arange(vocab_size) if path is None else read_kept_ids(Path(path), known)
    out = torch.isin(kept, torch.tensor(unshared, dtype=kept.dtype)) | (kept >= vocab_size)
    return None if len(kept := kept[~out]) == vocab_size else kept


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    kept_ids: Tensor | None = None,
) -> None:
    """Write weights, configuration, tokenizer and `kept_ids` [K] to `folder`, whole or not at all.

    LoRA is merged into the weights that are written.
    """
    transformers_logging.disable_progress_bar()
    with atomic_path(folder) as temporary:
        save_plain(model, temporary)
        tokenizer.save_pretrained(temporary)
        if kept_ids is not None:
            (temporary / KEPT_IDS).write_text(json.dumps(kept_ids.tolist()), encoding="utf-8")


def save_rounded(model: TargetConfig, folder: Path) -> None:
    """Write `model` with weights of 4 bits to `folder`, whole or not at all.

    Raises ValueError naming `target.path` for one that cannot be loaded or rounded.
    """
    source = ModelFolder(model)
    loaded = load_model(source, dtype=torch.bfloat16, device=torch.device("cpu"))
    try:
        levels = round_weights(loaded)
    except ValueError as error:
        raise ValueError(f"{model.named}: {error}") from error
    with atomic_path(folder) as temporary:
        save_plain(loaded, temporary)
        source.tokenizer.save_pretrained(temporary)
        save_file(levels, temporary / LEVELS)


def save_draft(draft: Adapter, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """`save_model` of a draft: a folder that `load_draft`, and serving, can load.

    The ids that a head keeps are among its weights.
    """
    kept = None if draft.reads else draft.kept_ids
    save_model(draft.model, tokenizer, folder, kept_ids=kept)


def with_path(model: Model, path: Path) -> Model:
    """`model` read from `path`: how a stage passes on what another stage has made."""
    return replace(model, path=str(path), revision=None)
