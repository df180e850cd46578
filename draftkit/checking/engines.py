"""What other people's engines do with a pair as its folders are, before they load a weight.

A rule is a short function over target and draft that yields, for the engines it speaks of, a level
and one sentence: what happens there, and the way out. Its docstring names where the fact comes
from. WRONG: the engine refuses the pair, or draws answers or drafts from other models than these.
The way out is mostly what `pipelines.export` writes.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from draftkit.checking.folders import ADAPTER, Folder
from draftkit.checking.rules import GOOD, NOTE, WRONG, Finding
from draftkit.checking.supported import ARCHITECTURES, PRE_TOKENIZER_TEXT, PRE_TOKENIZERS

ENGINES = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "vllm_cpu": "vLLM on CPU",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "onnx": "ONNX GenAI",
    "mlx": "mlx-lm",
}
VERSIONS = "transformers 5.23, vLLM 0.33, vllm-cpu 0.32, SGLang 0.5.23, llama.cpp 0.5.0, "
VERSIONS += "ONNX Runtime GenAI 0.18, mlx-lm 0.32"
VLLM = "vllm vllm_cpu"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PADDING = 64  # vLLM and SGLang fill the vocabulary up to a multiple of it
EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT = {"conv", "mamba", "linear_attention", "recurrent"}
ONNX_ROPES = {  # kinds of rotary scaling that a builder writes into the graph
    "LlamaForCausalLM": {"default", "llama3"},
    "SmolLM3ForCausalLM": {"default", "llama3"},
    "NemotronForCausalLM": {"default", "llama3"},
    "Phi3ForCausalLM": {"default", "longrope"},
    "HunYuanDenseV1ForCausalLM": {"default", "dynamic"},
}
_VLLM_METHODS = {"awq", "gptq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4"}
_VLLM_METHODS |= {"modelopt_mxfp8", "modelopt_mixed", "compressed-tensors", "experts_int8", "quark"}
_VLLM_METHODS |= {"moe_wna16", "torchao", "inc", "auto-round", "mxfp4", "humming"}
UNPACKED = {  # packed weights that an engine reads from a folder of safetensors
    "vllm": _VLLM_METHODS,
    "vllm_cpu": _VLLM_METHODS,
    "llamacpp": {"bitnet", "fp8", "gptq", "compressed-tensors", "modelopt", "mxfp4"},
    "mlx": {"bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt", "awq", "gptq"},
    "onnx": {"awq", "gptq", "quark", "olive", "modelopt"},
}

Line = tuple[str, str, str]  # engines, level, sentence


@dataclass(frozen=True)
class EngineFinding(Finding):
    """Of an engine, by the rule of that name."""

    rule: str


@dataclass(frozen=True)
class Pair:
    """What the rules look at; tensor_parallel: devices that share the weights of one model."""

    target: Folder
    draft: Folder
    tensor_parallel: int = 1

    def __iter__(self) -> Iterator[Folder]:
        return iter((self.target, self.draft))


def architecture(pair: Pair) -> Iterator[Line]:
    """An engine has code for some architectures.

    `supported.py` has the lists. vLLM (registry.py, `_try_resolve_transformers`) and SGLang
    (model_loader/utils.py) run others on transformers' code where that lets them exchange the
    attention; the rest raise "not supported". mlx-lm goes by `model_type`.
    """
    for one in pair:
        name = one.architecture
        if one.shape.is_encoder_decoder:
            for engine in ARCHITECTURES:
                yield engine, WRONG, f"{one.key}: no drafting for encoder-decoder models ({name})"
            continue
        for engine, names in ARCHITECTURES.items():
            if name in names or (engine == "mlx" and getattr(one.model, "__name__", "") in names):
                continue
            if engine in ("vllm", "vllm_cpu", "sglang") and _runs_in_others(name):
                yield engine, NOTE, f"{one.key}: {name} runs there on transformers' code"
            else:
                yield engine, WRONG, f"{one.key}: no code for {name}: choose a Llama or Qwen3"


def _runs_in_others(name: str) -> bool:
    model = getattr(transformers, name, None)
    return model is not None and model.is_backend_compatible()


def stateful(pair: Pair) -> Iterator[Line]:
    """A state that cannot go back has no way to forget a rejected draft.

    transformers generation/utils.py: "assisted generation is not supported with stateful models";
    mlx-lm generate.py: "requires a trimmable prompt cache"; onnxruntime-genai: "does not support
    LFM2 (hybrid SSM/attention) models"; the older runner of vLLM, the one on a CPU:
    v1/spec_decode/llm_base_proposer.py, "All drafting layers should belong to the same kv cache
    group".
    """
    kinds = pair.draft.layer_types & (ATTENTION | RECURRENT)
    if len(kinds) > 1 and kinds & RECURRENT:
        text = f"refuses a draft of {' and '.join(sorted(kinds))} layers"
        yield "vllm_cpu", WRONG, f"{text}: take one with a single kind"
    for one in pair:
        text = f"{one.key}: no drafting with a recurrent state ({one.architecture})"
        if getattr(one.model, "_is_stateful", False):
            yield "transformers mlx", WRONG, text
        elif one.layer_types & RECURRENT:
            yield "onnx mlx", WRONG, text


def vocabulary_size(pair: Pair) -> Iterator[Line]:
    """Rows of logits, which count rows of padding as well.

    vLLM config/speculative.py, `verify_equal_vocab_size_if_draft_model`; SGLang
    standalone_worker_v2.py, `_validate_vocab_compatibility`; transformers generation/utils.py,
    `_validate_generation_mode`; onnxruntime-genai: "Target and draft logit dimensions don't
    match"; llama.cpp common/speculative.cpp, `SPEC_VOCAB_MAX_SIZE_DIFFERENCE` 128. mlx-lm
    server.py compares the tokenizers' sizes, and only warns.
    """
    rows, wanted = pair.draft.rows, pair.target.rows
    if rows == wanted:
        return
    text = f"{rows:,} rows of logits in the draft, {wanted:,} in the target: export makes them one"
    yield f"{VLLM} sglang onnx", WRONG, f"refuses {text}"
    yield "transformers", WRONG, f"demands both tokenizers, to draft by text: {text}"
    if abs(rows - wanted) > 128:
        yield "llamacpp", WRONG, f"refuses more than 128 ids of difference: {text}"
    yield "mlx", NOTE, f"does not look at {text}"


def vocabulary(pair: Pair) -> Iterator[Line]:
    """The same string by the same id.

    SGLang standalone_worker_v2.py compares `get_vocab()`; llama.cpp common/speculative.cpp the
    text of each id from 5 on. The others do not look at the draft's tokenizer (vLLM gives the
    draft the target's), so that drafts of other ids are loaded, and rejected.
    """
    if pair.target.tokenizer is None or pair.draft.tokenizer is None:
        return
    texts, wanted = _texts(pair.draft.tokenizer), _texts(pair.target.tokenizer)
    different = sorted(i for i in texts.keys() | wanted.keys() if texts.get(i) != wanted.get(i))
    if not different:
        return
    first = different[0]
    one, other = (repr(texts[first]) if first in texts else "none"), repr(wanted.get(first))
    text = f"id {first} is {one} in the draft and {other} in the target"
    text += ": take a draft with the target's ids"
    yield "sglang", WRONG, f"refuses the pair: {text}"
    common = min(pair.target.rows, pair.draft.rows)
    if any(5 <= i < common for i in different):
        yield "llamacpp", WRONG, f"refuses the pair: {text}"
    yield f"transformers {VLLM} onnx mlx", WRONG, f"loads, and drafts nonsense: {text}"


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: text for text, number in tokenizer.get_vocab().items()}


def added_tokens(pair: Pair) -> Iterator[Line]:
    """llama.cpp common/speculative.cpp: both add the same first and last token to a text, or none.

    The other engines put a text into ids with the target's tokenizer alone.
    """
    if pair.target.tokenizer is None or pair.draft.tokenizer is None:
        return
    if (own := _added(pair.draft.tokenizer)) != (wanted := _added(pair.target.tokenizer)):
        text = f"the draft adds {own} around a text, the target {wanted}"
        yield "llamacpp", WRONG, f"refuses the pair: {text}: export takes the target's tokenizer"


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    ids = tokenizer("a")["input_ids"]
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    return (first if ids[:1] == [first] else None, last if ids[-1:] == [last] else None)


def end_of_text(pair: Pair) -> Iterator[Line]:
    """onnxruntime-genai models/builders/base.py: "Could not resolve eos_token_id".

    Elsewhere the target's end counts; answers of a target without one run to their limit.
    """
    for one in pair:
        if one.end is None:
            text = "no eos_token_id: add it to config.json"
            yield "onnx", WRONG, f"{one.key}: its builder stops, {text}"
            if one.key == "target":
                text = f"{one.key}: answers end at their limit alone, {text}"
                yield f"transformers {VLLM} sglang llamacpp mlx", NOTE, text


def context(pair: Pair) -> Iterator[Line]:
    """A draft that takes shorter texts than its target.

    vLLM 0.33 config/vllm.py, `_limit_max_model_len_to_draft`; on a CPU, which has the older runner,
    v1/worker/gpu_model_runner.py, `_input_fits_in_drafter`: "Zero out draft tokens". SGLang
    configs/model_config.py, `_derive_context_length`: refuses. The others count positions on; a
    table of positions ends, and ONNX graphs of rotary models hold one.
    """
    own, wanted = pair.draft.context, pair.target.context
    if own >= wanted:
        return
    text = f"draft takes {own:,} tokens, target {wanted:,}"
    mends = "export raises it" if pair.draft.rotates else "take another draft, or shorter texts"
    yield "vllm", NOTE, f"serves no text beyond {own:,} tokens: {text}: {mends}"
    yield "vllm_cpu", NOTE, f"drafts id 0 alone beyond {own:,} tokens: {text}: {mends}"
    yield "sglang", WRONG, f"refuses to start: {text}: {mends}"
    yield "onnx", WRONG, f"fails in texts beyond {own:,} tokens ({text}): {mends}"
    if pair.draft.rotates:
        yield "transformers llamacpp mlx", NOTE, f"drafts beyond what it was trained on: {text}"
    else:
        yield "transformers llamacpp mlx", WRONG, f"fails beyond {own:,} tokens ({text}): {mends}"


def head_size(pair: Pair) -> Iterator[Line]:
    """Numbers of an attention head that kernels are compiled for.

    vllm-cpu v1/attention/backends/cpu_attn.py, `get_supported_head_sizes`: not checked at start,
    the first pass ends the engine. On CUDA FlashAttention takes multiples of 8 up to 256
    (flash_attn.py, `supports_head_size`), and another kernel the rest.
    """
    for one in pair:
        if (size := one.head_size) is None:
            continue
        if size not in CPU_HEAD_SIZES:
            known = ", ".join(map(str, CPU_HEAD_SIZES))
            yield "vllm_cpu", WRONG, f"{one.key}: fails with heads of {size}: it takes {known}"
        if size % 8 or size > 256:
            yield "vllm", NOTE, f"{one.key}: no FlashAttention for heads of {size}: a slower kernel"


def tensor_parallel(pair: Pair) -> Iterator[Line]:
    """How both engines cut matrices; the draft is cut as the target is.

    vLLM config/model.py, `verify_with_parallel_config`; models/llama.py of both; layers/
    vocab_parallel_embedding.py of both. mlx-lm server.py: "draft models not supported in
    distributed mode".
    """
    count = pair.tensor_parallel
    if count == 1:
        return
    yield "mlx", WRONG, f"no drafting on {count} devices: check.tensor_parallel=1"
    for one in pair:
        padded = -(-one.rows // PADDING) * PADDING
        sizes = {
            "heads": one.heads,
            "intermediate size": getattr(one.text, "intermediate_size", None),
            "padded vocabulary": padded,
        }
        uneven = [f"{name} {size:,}" for name, size in sizes.items() if size and size % count]
        if (kv := one.kv_heads) and kv % count and count % kv:
            uneven.append(f"kv heads {kv}")
        if uneven:
            text = f"{one.key} does not divide by {count} ({', '.join(uneven)})"
            yield f"{VLLM} sglang", WRONG, f"{text}: use fewer devices"


def dtype(pair: Pair) -> Iterator[Line]:
    """vLLM config/speculative.py gives the draft the dtype of the target.

    config/model.py, `_resolve_auto_dtype`: "Downcast for float32 models", to the first that the
    platform lists, which is float16 on cards before Ampere.
    """
    own, wanted = pair.draft.text.dtype, pair.target.text.dtype
    if wanted == torch.float32:
        text = "runs both in bfloat16 (float16 on older cards), for the target is float32"
        yield VLLM, NOTE, f"{text}: --dtype float32 keeps it"
    elif own is not None and wanted is not None and own != wanted:
        names = [str(one).removeprefix("torch.") for one in (own, wanted)]
        yield VLLM, NOTE, f"runs the draft, which is {names[0]}, in {names[1]} as the target"


def output_head(pair: Pair) -> Iterator[Line]:
    """A head of its own that no file holds, or one in the file of a model that says it has none.

    transformers fills the first with random numbers, and says so in a warning; the onnx builder
    loads by it. vLLM and SGLang keep the memory as it was allocated (models/llama.py,
    `load_weights`), mlx-lm's `load_weights` is strict, llama.cpp takes the embeddings. A second
    matrix in a tied model counts for transformers, vLLM and llama.cpp, where it differs; the onnx
    builder and mlx-lm (models/*.py, `sanitize`) drop it.
    """
    for one in pair:
        if not one.tensors or one.rows_of(*EMBEDDINGS) is None:
            continue
        tied, held = one.text.tie_word_embeddings, one.rows_of(*HEADS) is not None
        if not tied and not held:
            text = "no file holds the output head, and tie_word_embeddings is false"
            for engine, does in _WITHOUT_A_HEAD.items():
                yield engine, WRONG, f"{one.key}: {does}: {text}: save the model whole"
        if tied and held:
            text = "tie_word_embeddings is true, and a file holds a head"
            yield "onnx mlx", NOTE, f"{one.key}: uses the embeddings for a head: {text}"


_WITHOUT_A_HEAD = {
    "transformers onnx": "draws a random head",
    f"{VLLM} sglang": "runs a head that was never written, and accepts nothing",
    "llamacpp": "uses the embeddings for a head",
    "mlx": "refuses it",
}


def embeddings(pair: Pair) -> Iterator[Line]:
    """All engines allocate `vocab_size` rows and copy the file's into them."""
    for one in pair:
        for kind in (EMBEDDINGS, HEADS):
            rows = one.rows_of(*kind)
            if rows is not None and rows != one.rows:
                text = f"{rows:,} rows in {kind[0]}, vocab_size {one.rows:,}"
                yield _ALL, WRONG, f"{one.key}: cannot be loaded: {text}: save the model whole"
                break


def adapter(pair: Pair) -> Iterator[Line]:
    """A model is one whole folder everywhere.

    transformers (peft integration) loads the base of an adapter by its name, where it is there.
    """
    for one in pair:
        if ADAPTER in (one.names or ()):
            yield _ALL, WRONG, f"{one.key}: an adapter, no whole model: export merges it"


def weights(pair: Pair) -> Iterator[Line]:
    """mlx_lm/utils.py reads `model*.safetensors` alone; the others fall back on pickles."""
    for one in pair:
        if one.names is None or one.tensors or ADAPTER in one.names:
            continue
        if any(name.endswith((".bin", ".pt", ".pth")) for name in one.names):
            yield "mlx", WRONG, f"{one.key}: reads safetensors only: export writes them"
            text = f"{one.key}: loads a pickle, which may run code: export writes safetensors"
            yield f"transformers {VLLM} sglang llamacpp onnx", NOTE, text
        else:
            yield _ALL, WRONG, f"{one.key}: no weights: copy the safetensors files there"


def tokenizer_files(pair: Pair) -> Iterator[Line]:
    """Of the draft, where an engine looks for them.

    SGLang standalone_worker_v2.py, llama.cpp's conversion, onnxruntime-genai's builder
    (`save_processing`) and mlx-lm's `load` read them; vLLM and transformers need the target's.
    """
    for one in pair:
        if one.tokenizer is None:
            text = f"{one.key}: no tokenizer files"
            yield "sglang llamacpp onnx mlx", WRONG, f"{text}: export copies the target's"
            if one.key == "draft":
                yield f"transformers {VLLM}", NOTE, f"{text}: the target's are used"
            else:
                yield f"transformers {VLLM}", WRONG, f"{text}: save them into the folder"


def quantization(pair: Pair) -> Iterator[Line]:
    """Weights packed by another library.

    llama.cpp conversion/base.py: "Quant method is not yet supported"; mlx_lm/utils.py,
    `load_model`; onnxruntime-genai models/loaders; vLLM layers/quantization/__init__.py: "Unknown
    quantization method".
    """
    for one in pair:
        if (method := one.quantization) is None:
            continue
        text = f"{one.key}: weights packed by {method}"
        for engine, known in UNPACKED.items():
            if method not in known:
                yield engine, WRONG, f"{text}, which it cannot read: export writes plain ones"
            elif engine in ("vllm", "vllm_cpu"):
                yield engine, NOTE, f"{text}: needs kernels of the device for it"
        yield "transformers sglang", NOTE, f"{text}: needs the library of it"


def window(pair: Pair) -> Iterator[Line]:
    """Attention that sees the last tokens alone, in some layers or in all.

    vLLM v1/spec_decode/llm_base_proposer.py, `validate_same_kv_cache_group`: all layers of a draft
    are of one kind. onnxruntime-genai: "Cannot rewind", what left the window is gone.
    mlx_lm/models/cache.py: a full `RotatingKVCache` is not trimmed, so rejected drafts stay in it.
    """
    kinds = " and ".join(sorted(pair.draft.layer_types & ATTENTION))
    if " " in kinds:
        yield VLLM, WRONG, f"refuses a draft of {kinds} layers: take one with a single kind"
    for one in pair:
        if "sliding_attention" in one.layer_types:
            size = getattr(one.text, "sliding_window", None) or 0
            text = f"{one.key}: fails in texts beyond its window of {size:,} tokens"
            yield "onnx", WRONG if size < one.context else NOTE, text
            text = f"{one.key}: rejected drafts stay in a full window of {size:,} tokens"
            yield "mlx", NOTE, f"{text}: keep texts shorter"


def rope(pair: Pair) -> Iterator[Line]:
    """Rotary scaling that the onnx builder does not write.

    onnxruntime-genai models/builders/base.py, `make_rope_init`: "RoPE style is not currently
    supported"; builders/llama.py looks for llama3 alone, and takes the rest for no scaling. All of
    them read one `rope_type`, which Gemma 3 has for each kind of layers: "KeyError: 'rope_type'".
    """
    for one in pair:
        if one.rotates_by_layer:
            text = "its builder stops at rotations that differ by kind of layers"
            yield "onnx", WRONG, f"{one.key}: {text}"
            continue
        known = ONNX_ROPES.get(one.architecture, {"default", "linear", "yarn"})
        for kind in sorted(one.rope_types - known):
            if one.architecture in ONNX_ROPES:
                yield "onnx", WRONG, f"{one.key}: computes without its {kind} rotary scaling"
            else:
                yield "onnx", WRONG, f"{one.key}: its builder stops at {kind} rotary scaling"


def sampling(pair: Pair) -> Iterator[Line]:
    """Defaults of the target's generation_config.json that a request inherits.

    vLLM sampling_params.py, `_validate_spec_decode`: "min_p and logit_bias [...] not yet supported
    with speculative decoding"; transformers generation/configuration_utils.py,
    `get_generation_mode`. onnxruntime-genai's builder copies neither.
    """
    given = pair.target.generation
    if (least := given.get("min_p")) is not None and least > 0:
        text = f"refuses requests while generation_config.json has min_p {least:g}"
        yield VLLM, WRONG, f"{text}: remove it, or serve with --generation-config vllm"
    if (beams := given.get("num_beams") or 1) > 1:
        text = f"drops num_beams {beams} of generation_config.json while it drafts"
        yield "transformers", WRONG, f"{text}: remove it, or serve without a draft"


def rounds(pair: Pair) -> Iterator[Line]:
    """transformers generation/candidate_generator.py: 20 drafts, fewer where q falls below 0.4."""
    if pair.draft.names is not None and "num_assistant_tokens" not in pair.draft.generation:
        text = "drafts up to 20 tokens a round, by its defaults"
        yield "transformers", NOTE, f"{text}: export writes the best gamma"


def kept_ids(pair: Pair) -> Iterator[Line]:
    """The list beside a head that stays whole is draftkit's own."""
    if pair.draft.keeps_ids:
        yield _ALL, NOTE, "does not know kept_ids.json: drafts of all ids, so alpha differs"


def pre_tokenizer(pair: Pair) -> Iterator[Line]:
    """llama.cpp conversion/base.py: "BPE pre-tokenizer was not recognized"."""
    one = pair.target.tokenizer
    backend = getattr(one, "backend_tokenizer", None)
    if one is None or type(getattr(backend, "model", None)).__name__ != "BPE":
        return
    digest = hashlib.sha256(str(one.encode(PRE_TOKENIZER_TEXT)).encode()).hexdigest()
    if digest[:8] not in PRE_TOKENIZERS:
        text = "convert_hf_to_gguf.py does not know this tokenizer: use the GGUF of export"
        yield "llamacpp", NOTE, text


_ALL = " ".join(ENGINES)
RULES: tuple[Callable[[Pair], Iterator[Line]], ...] = (
    architecture,
    stateful,
    adapter,
    weights,
    tokenizer_files,
    vocabulary_size,
    vocabulary,
    added_tokens,
    end_of_text,
    embeddings,
    output_head,
    head_size,
    tensor_parallel,
    quantization,
    window,
    rope,
    context,
    sampling,
    dtype,
    rounds,
    kept_ids,
    pre_tokenizer,
)


def engine_findings(pair: Pair, engines: Collection[str] = ()) -> Iterator[EngineFinding]:
    """What the rules say of each of `engines` (none: all), engine by engine.

    A line for each that is not WRONG anywhere comes first, GOOD.
    """
    lines: dict[str, list[EngineFinding]] = {name: [] for name in engines or ENGINES}
    for rule in RULES:
        for names, level, text in rule(pair):
            for name in names.split():
                if name in lines:
                    one = EngineFinding(level, ENGINES[name], text, rule.__name__)
                    lines[name] = _joined([*lines[name], one])
    for name, own in lines.items():
        if not any(one.level == WRONG for one in own):
            yield EngineFinding(GOOD, ENGINES[name], "loads the pair as it is", "")
        yield from own


def _joined(lines: list[EngineFinding]) -> list[EngineFinding]:
    """The same of the target and then of the draft is one finding."""
    if len(lines) < 2:
        return lines
    *rest, first, last = lines
    if last.text.startswith("draft: ") and first.text == f"target: {last.text[7:]}":
        return [*rest, replace(last, text=f"both: {last.text[7:]}")]
    return lines
