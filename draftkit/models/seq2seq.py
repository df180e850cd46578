"""Encoder-decoder models behind the face of `adapter`: the encoder once, then tokens and slots.

A T5-type decoder (Raffel et al. 1910.10683) attends to its own tokens, as a causal model does, and
to the text of its encoder. `encode` runs the encoder once a request and keeps the keys and values
of cross attention in the rows of the cache; from then on all is as in a causal model. The blocks of
the decoder are called one by one, with finished biases: the stack around them derives one bias from
one length of the cache, and here every row stands at a position of its own.

A row of text holds both parts, so that nobody else need tell them apart: what the encoder reads,
the token that begins a decoder's text, and that text. The start token (T5's padding) is in no text
that is read, so its first occurrence parts them.

Shapes: B rows, L tokens of both parts, E encoder tokens, N new decoder tokens, T decoder tokens,
C slots attended to, V real vocabulary, H hidden size.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicLayer,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from draftkit.models.adapter import Adapter, Head, additive, cache_argument
from draftkit.models.cache import SlotCache
from draftkit.models.parallel import Packing
from draftkit.models.shapes import UNBOUNDED

T5_TYPES = ("t5", "mt5")


def inside(lengths: Tensor, width: int) -> Tensor:
    """Return [B, width] bool: what is text and no padding.

    A row without text shows its first slot, lest its softmax become NaN and stay in its slots.
    """
    return torch.arange(width, device=lengths.device) < lengths.clamp(min=1)[:, None]


def start_token(config: PreTrainedConfig, generation: GenerationConfig | None) -> int | None:
    """The token that begins a decoder's text; None for a decoder-only model.

    Raises ValueError for an encoder-decoder model that does not say it.
    """
    if not config.is_encoder_decoder:
        return None
    for one in (generation, config):
        if (start := getattr(one, "decoder_start_token_id", None)) is not None:
            return int(start)
    raise ValueError(
        f"target.path: {config.model_type} has no decoder_start_token_id: add the first id of "
        "decoder texts to generation_config.json (0 for T5)"
    )


class Seq2SeqAdapter(Adapter):
    """`Adapter` with an encoder for a T5-type model. Raises ValueError for other types."""

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int, kept_ids: Tensor | None = None
    ) -> None:
        if kept_ids is not None:
            raise ValueError(
                "draft.shrink.vocabulary, draft.extra_tokens: a drafter that is an encoder-decoder "
                "model proposes all ids: use 0 and refuse"
            )
        config: Any = model.config
        if config.model_type not in T5_TYPES:
            raise ValueError(
                f"{config.model_type}: its decoder takes positions from the length of its cache, "
                "which is fixed here; of encoder-decoder models, use a T5-type one "
                f"({', '.join(T5_TYPES)})"
            )
        super().__init__(model, vocab_size=vocab_size, max_positions=UNBOUNDED)
        self.start_id = start_token(config, model.generation_config)
        # T5 1.0 was trained with logits of scaled hidden states, 1.1 and mT5 without.
        scaled = getattr(config, "scale_decoder_outputs", False)
        self._scale: float = config.d_model**-0.5 if scaled else 1.0
        first = self._decoder.block[0]
        self._block_takes = cache_argument(first)
        attention = first.layer[0].SelfAttention  # its bias serves all blocks
        self._farthest: int = attention.relative_attention_max_distance
        buckets = attention._relative_position_bucket(
            -torch.arange(self._farthest + 1, device=self.device),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=self._farthest,
        )
        self.register_buffer("_buckets", buckets, persistent=False)  # [distances 0..farthest]

    @property
    def signature(self) -> Hashable:
        # The configuration conceals whether the head is tied.
        tied = self._head.weight is self.model.get_input_embeddings().weight
        return (super().signature, tied)

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: SlotCache) -> None:
        """Run the encoder over `tokens` [B, E] of `lengths` [B] >= 1; fill the rows of the cache.

        Padding, on the right, is seen neither by the encoder nor by cross attention. The texts stay
        those of these weights when others are loaded.
        """
        states = self._encoded(tokens, lengths)
        layers = []
        for block in self._decoder.block:
            attention = block.layer[1].EncDecAttention
            shape = (*tokens.shape, attention.n_heads, attention.key_value_proj_dim)
            layers.append((attention.k(states).view(shape), attention.v(states).view(shape)))
        cache.write_encoder(layers, lengths)

    def step(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache, last: int = 0) -> Tensor:
        hidden = self._decode(tokens, positions, cache)[:, -last:] * self._scale
        return self._head(hidden)[..., : self.vocab_size]

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache) -> None:
        self._decode(tokens, positions, cache)

    def states(self, tokens: Tensor, keep: Tensor, packing: Packing | None = None) -> Tensor:
        if packing is not None:
            raise ValueError("draft.kind=pard: an encoder-decoder drafter is plain: use plain")
        starts: Any = tokens == self.start_id
        lengths = starts.int().argmax(1)  # [B] of what the encoder reads
        encoder = tokens[:, : int(lengths.max())]  # [B, E]
        most = tokens.shape[1]
        order = torch.arange(most - int(lengths.min()), device=tokens.device)
        columns = lengths[:, None] + order  # [B, T] of the decoder's text in the rows
        kept = keep.gather(1, columns.clamp(max=most - 1)) & (columns < most)
        hidden = self._decoder(
            input_ids=tokens.gather(1, columns.clamp(max=most - 1)),
            encoder_hidden_states=self._encoded(encoder, lengths),
            encoder_attention_mask=inside(lengths, encoder.shape[1]),
            use_cache=False,
        ).last_hidden_state
        return hidden[kept] * self._scale

    @property
    def head(self) -> Head:
        return Head(self._head.weight[: self.vocab_size], None)

    @property
    def _decoder(self) -> Any:
        return self.model.get_decoder()

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def _encoded(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The encoder's states [B, E, H]."""
        encoder: Any = self.model.get_encoder()
        mask = inside(lengths, tokens.shape[1])
        return encoder(input_ids=tokens, attention_mask=mask).last_hidden_state

    def _decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """The last hidden states [B, N, H], normed and not scaled."""
        decoder = self._decoder
        # [B, heads, N, C]: the learned bias of each distance; slots after the position masked.
        attention = decoder.block[0].layer[0].SelfAttention
        by_distance = attention.relative_attention_bias(self._buckets)  # [farthest + 1, heads]
        distance = positions[..., None] - torch.arange(cache.visible, device=positions.device)
        own_bias = by_distance[distance.clamp(0, self._farthest)].permute(0, 3, 1, 2)
        own_bias = own_bias.masked_fill((distance < 0)[:, None], torch.finfo(own_bias.dtype).min)
        own_bias = own_bias.contiguous()
        encoder_text = inside(cache.encoder_lengths, cache.encoder_capacity)
        cross_bias = additive(encoder_text, self.dtype)[:, None, None]  # [B, 1, 1, E]
        layers: list[Any] = [DynamicLayer() for _ in decoder.block]
        for layer, states in zip(layers, cache.read_encoder(), strict=True):
            layer.keys, layer.values = states
            layer.is_initialized = True
        caches = EncoderDecoderCache(cache.at(positions), Cache(layers=layers))
        hidden = decoder.embed_tokens(tokens)
        for block in decoder.block:
            hidden = block(
                hidden,
                position_bias=own_bias,
                encoder_hidden_states=hidden,  # says that there are some; `caches` hold them
                encoder_decoder_position_bias=cross_bias,
                is_causal=False,  # the biases are masks as well, and whole
                **{self._block_takes: caches},
            )[0]
        return decoder.final_layer_norm(hidden)
