"""From a configuration to models in memory: weights, tokenizer, the pair.

Loads what `save_pretrained` wrote, safetensors only, and refuses with one line what it cannot
load whole (Hugging Face would fill missing weights with random numbers). It knows no prompts, no
losses, no decoding.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftkit.artifacts import atomic_path, first_line
from draftkit.config import PARD, PLAIN, DraftConfig, HardwareConfig, ModelConfig, TargetConfig
from draftkit.hub import hub_has
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.attention import fit_to_device
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.files import KEPT_IDS, check_weights, unread
from draftkit.models.head_files import kind_of_head, load_head
from draftkit.models.heads import EAGLE3, MEDUSA, head_class, layers_read
from draftkit.models.lora import save_plain
from draftkit.models.parallel import parallel_of
from draftkit.models.probe import check_packing, check_passes
from draftkit.models.seq2seq import Seq2SeqAdapter, start_token
from draftkit.models.shrink import layer_count, layer_stack, read_kept_ids, write_kept_ids
from draftkit.models.vocabulary import check_same_tokenizer, count_ids, fit_rows, real_vocab_size

Model = TypeVar("Model", bound=ModelConfig)

WHOLE = "give a complete folder written by save_pretrained"


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


@contextmanager
def _refusing(
    model: ModelConfig,
    failure: str = "cannot load the model",
    remedy: str = WHOLE,
) -> Iterator[None]:
    """Errors of reading `model` become a ValueError of one line that names its key."""
    try:
        yield
    except Exception as error:  # what a damaged folder, or a missing package, raises has no bound
        if not Path(model.location).is_dir():
            remedy = f"fetch all of it by `hf download {model.path}`, or {remedy}"
        raise ValueError(
            f"{model.key}.path {model.path}: {failure} ({first_line(error)}): {remedy}"
        ) from error


def _source(model: ModelConfig) -> dict[str, Any]:
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}


def auto_model(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model of `config`."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model`. Raises ValueError naming its key for one that is unusable."""
    model_config(model)  # which transformers reads too, and would take for a fault of the tokenizer
    remedy = "save the tokenizer into the folder with save_pretrained"
    with _refusing(model, "no usable tokenizer", remedy):
        tokenizer = AutoTokenizer.from_pretrained(model.location, **_source(model))
    assert tokenizer is not None
    return tokenizer


def load_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
) -> PreTrainedModel:
    """Load a language model for inference, in `dtype` (`auto`: as stored) on `device`, dropout off.

    Raises ValueError naming the model's key for a missing, corrupt or incomplete one.
    """
    transformers_logging.disable_progress_bar()
    config = model_config(model)
    check_weights(model)
    remedy, quantised = WHOLE, getattr(config, "quantization_config", None)
    if isinstance(quantised, Mapping):
        method = quantised.get("quant_method")
        remedy = f"it is quantised by {method}: install what reads that, or give it unquantised"
    # Read to where they stay, and not through the host's memory.
    options: dict[str, Any] = {"device_map": device} if device.type == "cuda" else {}
    with _refusing(model, remedy=remedy):
        loaded, report = auto_model(config).from_pretrained(
            model.location,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_source(model),
            **options,
        )
    absent = sorted([*report["missing_keys"], *report["mismatched_keys"]], key=str)
    if absent:
        raise ValueError(
            f"{model.key}.path {model.path}: {len(absent)} weights are missing or of another shape "
            f"(first: {absent[0]}): {WHOLE}"
        )
    if left := unread(loaded, report["unexpected_keys"]):
        raise ValueError(
            f"{model.key}.path {model.path}: {len(left)} weights have no place in the model of its "
            f"config.json (first: {left[0]}), which would be another model without them: {WHOLE}"
        )
    return loaded.to(device).eval()


def adapter_of(
    model: PreTrainedModel, *, vocab_size: int, kept_ids: Tensor | None = None
) -> Adapter:
    """The face of a decoder-only or an encoder-decoder `model`."""
    if model.config.is_encoder_decoder:
        return Seq2SeqAdapter(model, vocab_size=vocab_size, kept_ids=kept_ids)
    return CausalAdapter(fit_to_device(model), vocab_size=vocab_size, kept_ids=kept_ids)


def model_config(model: ModelConfig) -> PreTrainedConfig:
    """The shapes of a model, without its weights. Raises ValueError naming the model's key."""
    check_folder(model)
    with _refusing(model):
        config = AutoConfig.from_pretrained(model.location, **_source(model))
    known = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    own_code = model.trust_remote_code and getattr(config, "auto_map", None)
    if type(config) not in known[config.is_encoder_decoder] and not own_code:
        raise ValueError(
            f"{model.key}.path {model.path}: transformers has no {auto_model(config).__name__} of "
            f"the type {config.model_type}: give a model that reads and writes text alone"
        )
    return config


def check_folder(model: ModelConfig) -> None:
    """Raise ValueError if `model.path` is no model folder, and no model of the hub in reach."""
    assert model.path is not None
    key = model.key
    path, name = Path(model.location), f"{key}.path {model.path}"
    if model.names_gguf:
        raise ValueError(f"{name}: commands read a GGUF file into a folder: give {key}.path there")
    looks_local = path.is_absolute() or model.path.startswith((".", "~")) or path.exists()
    if not looks_local and model.path.count("/") == 1:
        if hub_has(model.path, "config.json", section=key, revision=model.revision):
            return
        at = f" at {key}.revision={model.revision}" if model.revision else ""
        raise ValueError(
            f"{name}: no folder here, and the hub has no config.json of it{at}: correct the name, "
            "or log in with `hf auth login` where it is a private one"
        )
    if not path.is_dir():
        raise ValueError(
            f"{name}: no such folder: "
            "give one written by save_pretrained, or a hub name OWNER/MODEL"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{name}: holds no config.json: give a folder written by save_pretrained")


def end_of_text_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Ids that end a text: those of the generation config (one or a list) and the tokenizer's."""
    declared = generation.eos_token_id if generation else None
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))


def load_outline(model: TargetConfig, hardware: HardwareConfig) -> Outline:
    """What `load_target` loads, but the weights. Raises ValueError naming `target.path`."""
    device, tokenizer = resolve_device(hardware), load_tokenizer(model)
    ends = declared_ends(model, tokenizer)
    dtype = resolve_dtype(hardware, device)
    return Outline(tokenizer=tokenizer, eos_token_ids=ends, dtype=dtype, device=device)


def with_frame(outline: Outline, model: TargetConfig) -> Outline:
    """`outline` with the `frame` of its target, of which one tensor is read.

    Raises ValueError for a target whose embeddings are more than that.
    """
    shape = model_config(model)
    with torch.device("meta"):
        whole = auto_model(shape).from_config(shape)
    embeddings: Any = whole.get_input_embeddings()
    if type(embeddings) is not nn.Embedding:
        raise ValueError(
            f"generate.hidden_states: {shape.model_type} does more to a token than look it up: use "
            "generate.hidden_states=false and generate.top_k=0"
        )
    name = next(name for name, module in whole.named_modules() if module is embeddings) + ".weight"
    index, file = "model.safetensors.index.json", "model.safetensors"
    find = partial(cached_file, model.location, revision=model.revision)
    with _refusing(model):
        parts = find(index, _raise_exceptions_for_missing_entries=False)
        if parts is not None:
            file = json.loads(Path(parts).read_text(encoding="utf-8"))["weight_map"][name]
        with safe_open(str(find(file)), "pt") as stored:
            rows = stored.get_tensor(name).to(outline.device, outline.dtype)
    whole.set_input_embeddings(nn.Embedding.from_pretrained(rows, freeze=True))
    size = real_vocab_size(outline.tokenizer, shape, "target")
    return replace(outline, frame=adapter_of(whole, vocab_size=size))


def declared_generation(target: TargetConfig) -> GenerationConfig:
    """How a target generates, whose weights are not loaded for it."""
    try:
        revision = target.revision or "main"
        return GenerationConfig.from_pretrained(target.location, revision=revision)
    except OSError:  # it has no file of its own
        return GenerationConfig.from_model_config(model_config(target))


def declared_ends(target: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a text of a target."""
    return end_of_text_ids(declared_generation(target), tokenizer)


def decoder_start(target: TargetConfig) -> int | None:
    """The id that begins a decoder's text; None for a decoder-only target."""
    return start_token(model_config(target), declared_generation(target))


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
    outline = load_outline(model, hardware)
    loaded = load_model(model, dtype=dtype or outline.dtype, device=outline.device)
    # A target never changes, so compiled code may pack its weights.
    loaded.requires_grad_(False)
    size = real_vocab_size(outline.tokenizer, loaded.config, "target")
    adapter = adapter_of(loaded, vocab_size=size)
    if probed:
        check_passes(adapter, f"target.path {model.path}")
    return Target(adapter=adapter, **vars(outline))


def load_draft(model: DraftConfig, target: Outline, *, dtype: torch.dtype | None = None) -> Adapter:
    """Load a draft for `target` in `dtype`, else the target's.

    One with a list of kept ids in its folder proposes no others. Raises ValueError for a draft
    that cannot be loaded or does not share the vocabulary.
    """
    dtype, device = dtype or target.dtype, target.device
    shape = model_config(model)
    if head_class(shape) is not None:
        return load_head_of(model, shape, target, dtype)
    loaded, size, kept_ids = load_sharing(model, target.tokenizer, dtype=dtype, device=device)
    if isinstance(target, Target):
        check_same_shape(target.adapter.model.config, loaded.config)
    check_kind(model, loaded.config)
    adapter = adapter_of(loaded, vocab_size=size, kept_ids=kept_ids)
    check_passes(adapter, f"draft.path {model.path}")
    if adapter.parallel is not None:
        check_packing(adapter, f"draft.path {model.path}")
    return adapter


def load_head_of(
    model: DraftConfig, shape: PreTrainedConfig, target: Outline, dtype: torch.dtype
) -> Adapter:
    """A head, whose folder may have no tokenizer. It reads a target, which must be in memory."""
    known = target.adapter if isinstance(target, Target) else target.frame
    if known is None:
        raise ValueError(
            f"draft.path {model.path}: a head reads the target's hidden states, and the target is "
            "not loaded: use generate.hidden_states=true, or generate.top_k=0"
        )
    check_kind(model, shape)
    return load_head(model, shape, known, dtype=dtype)


def load_sharing(
    model: DraftConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
) -> tuple[PreTrainedModel, int, Tensor | None]:
    """A draft with a row for each of the V ids of `tokenizer`; V; its `load_kept_ids`."""
    own, size = load_tokenizer(model), count_ids(tokenizer)
    unshared = check_same_tokenizer(
        target_tokenizer=tokenizer, draft_tokenizer=own, extra_tokens=model.extra_tokens
    )
    loaded = load_model(model, dtype=dtype, device=device)
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
    if {own, model.kind} & {EAGLE3, MEDUSA} and model.kind not in (own, PLAIN):
        raise ValueError(
            f"draft.path {model.path}: a drafter of the kind {own}, and draft.kind={model.kind}: "
            f"give draft.kind={own}"
        )
    if model.kind == PARD and parallel_of(config) is None and not learns:
        raise ValueError(
            f"draft.path {model.path}: a plain drafter (its config.json names no pard_token), and "
            "draft.kind=pard proposes in one pass: train one by `distill draft.kind=pard`, or give "
            "draft.kind=plain"
        )


def load_kept_ids(
    model: DraftConfig, vocab_size: int, unshared: Sequence[int] = ()
) -> Tensor | None:
    """The ids [K] that a draft's folder keeps, but the `unshared` ones; None for all.

    Raises ValueError for a damaged list.
    """
    with _refusing(model):
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
            write_kept_ids(temporary, kept_ids)


def save_draft(draft: Adapter, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """`save_model` of a draft: a folder that `load_draft`, and serving, can load.

    The ids that a head keeps are among its weights.
    """
    kept = None if draft.reads else draft.kept_ids
    save_model(draft.model, tokenizer, folder, kept_ids=kept)


def with_path(model: Model, path: Path) -> Model:
    """`model` read from `path`: how a stage passes on what another stage has made."""
    return replace(model, path=str(path), revision=None)
