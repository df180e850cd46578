"""Tiny random models of many architectures, and a byte tokenizer, made in the process.

Every builder is deterministic in its seed. Random models of the usual initialisation say the same
of every text; these have wide weights and a scaled head, so that contexts matter, greedy choices
are no near ties and sampled texts vary.
"""

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MT5Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import Target
from draftkit.models.seq2seq import Seq2SeqAdapter

END, PAD = "<|end|>", "<|pad|>"
VOCAB_SIZE = 258  # bytes, end, padding
MAX_POSITIONS = 128
WINDOW = 8  # of sliding attention, shorter than the texts of the tests
LOGIT_SPREAD = 4.0  # standard deviation over the vocabulary, at a large margin between the best

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_POSITIONS,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "tie_word_embeddings": False}
_GEMMA = _GROUPED | {"head_dim": 16, "num_key_value_heads": 1}
ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _GROUPED),
    "gpt2": (
        GPT2Config,
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128}
        | {"n_positions": MAX_POSITIONS, "tie_word_embeddings": False},
    ),
    "gpt_neox": (GPTNeoXConfig, _SHAPE),
    "qwen2": (Qwen2Config, _GROUPED),
    "qwen3": (Qwen3Config, _GROUPED | {"head_dim": 16}),
    "mistral": (MistralConfig, _GROUPED | {"sliding_window": WINDOW}),
    "gemma": (GemmaConfig, _GEMMA),
    "gemma2": (
        Gemma2Config,
        _GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        Gemma3TextConfig,
        _GEMMA
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

_T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "num_layers": 3,  # of the encoder: one more, so that nothing may count the wrong ones
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,  # shorter than the texts of the tests
}
START = VOCAB_SIZE - 1  # padding begins the decoder's text, as in T5
SEQ2SEQ: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "t5": (T5Config, _T5 | {"feed_forward_proj": "relu"}),  # scaled, tied head
    "t5 1.1": (T5Config, _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": (MT5Config, _T5),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then END and PAD: VOCAB_SIZE ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A random model for inference; `changes` go to its configuration."""
    config_class: Any
    config_class, settings = ARCHITECTURES[architecture]
    ids: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = config_class(**settings | ids | {"vocab_size": vocab_size} | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in sorted(made.named_parameters()):
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
    return _peaky(made.eval()).to(dtype)


@torch.no_grad()
def _peaky(made: Any) -> Any:
    """Scale the head: logits before a soft cap get the standard deviation LOGIT_SPREAD."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(made.config.vocab_size, (8, 16), generator=generator)
    head = made.get_output_embeddings()
    hidden = made.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    spread = head(hidden).std(-1).mean()
    head.weight.mul_(LOGIT_SPREAD / spread)
    return made


def seq2seq_model(
    kind: str = "t5", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random encoder-decoder model for inference; the head is its own but for "t5"."""
    config_class: Any
    config_class, settings = SEQ2SEQ[kind]
    ids = {"eos_token_id": None, "pad_token_id": START, "decoder_start_token_id": START}
    config = config_class(**settings | ids | {"vocab_size": VOCAB_SIZE} | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        if kind != "t5":
            made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
        for name, weight in sorted(made.named_parameters()):
            if weight.dim() > 1:
                scale = 1.0
                if name.endswith(".q.weight"):  # since T5 does not scale products of attention
                    scale = config.d_kv**-0.5
                elif name.endswith("relative_attention_bias.weight"):  # places matter
                    scale = 4.0
                elif name == "shared.weight":  # lest a tied head say the last token again
                    scale = 0.1
                torch.nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
        tokens = torch.randint(256, (8, 16))
    with torch.no_grad():
        spread = made.eval()(input_ids=tokens, decoder_input_ids=tokens).logits.std(-1).mean()
        made.decoder.final_layer_norm.weight.mul_(LOGIT_SPREAD / spread)
    return made.to(dtype)


@torch.no_grad()
def related(target: PreTrainedModel, *, noise: float = 0.12, seed: int = 1) -> PreTrainedModel:
    """A draft for `target`: its copy with every matrix disturbed by a share `noise` of itself."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    for _, weight in sorted(draft.named_parameters()):
        if weight.dim() > 1:
            shock = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_((noise * weight.std() * shock).to(weight.dtype))
    return draft


def adapter(architecture: str = "llama", **options: Any) -> CausalAdapter:
    """`model` behind the adapter."""
    return CausalAdapter(model(architecture, **options), vocab_size=VOCAB_SIZE)


def pair(
    architecture: str = "llama", *, noise: float = 0.12, **options: Any
) -> tuple[CausalAdapter, CausalAdapter]:
    """A target and a draft that agrees with it in part."""
    target = model(architecture, **options)
    draft = related(target, noise=noise)
    return (
        CausalAdapter(target, vocab_size=VOCAB_SIZE),
        CausalAdapter(draft, vocab_size=VOCAB_SIZE),
    )


def target_of(adapter: CausalAdapter, tokenizer: Any, *ends: int) -> Target:
    """`adapter` with all that goes with the model of a target."""
    return Target(
        adapter=adapter,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        dtype=adapter.dtype,
        device=adapter.device,
    )


def seq2seq_pair(
    kind: str = "t5", *, noise: float = 0.12, **options: Any
) -> tuple[Seq2SeqAdapter, Seq2SeqAdapter]:
    """An encoder-decoder target and a draft that agrees with it in part."""
    target = seq2seq_model(kind, **options)
    draft = related(target, noise=noise)
    return (
        Seq2SeqAdapter(target, vocab_size=VOCAB_SIZE),
        Seq2SeqAdapter(draft, vocab_size=VOCAB_SIZE),
    )


def prompts(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    """Random prompts of those lengths, of bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in lengths]


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    """Random texts [rows, length] of bytes."""
    return torch.tensor(prompts([length] * rows))


@torch.no_grad()
def logits(model: Any, texts: Tensor) -> Tensor:
    """The model's own logits [B, T, V] of `texts` [B, T], with nothing of ours."""
    return model(input_ids=texts, use_cache=False).logits
