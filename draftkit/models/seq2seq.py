"""Encoder-decoder models behind the face of `adapter`: the encoder once, then tokens and slots.

A T5-type decoder (Raffel et al. 1910.10683) attends to its own tokens, as a causal model does, and
to the text of its encoder. `encode` runs the encoder once a request and stores the keys and values
of cross attention in the rows of the cache. From then on `step` and `prefill` feed decoder tokens
at their positions, and rolling back is writing slots again. The blocks of the decoder are called
one by one, with finished biases: the stack around them derives one bias from one length of the
cache, and here every row stands at a position of its own. The model itself is left as it is.

`PrefixedAdapter` puts a decoder-only draft behind the same face: it reads the encoder's text as
the beginning of its own. Neither knows sampling, losses or schedules.

Shapes: B rows, E encoder tokens, N new decoder tokens, T decoder tokens, C slots attended to,
V real vocabulary, H hidden size.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicLayer, EncoderDecoderCache, PreTrainedModel

from draftkit.models.adapter import Adapter, KeyValueCache, additive, copy_weights

T5_TYPES = ("t5", "mt5")

Feed = Callable[..., Any]  # the signature of `Adapter.step`


class EncoderCache(KeyValueCache, Protocol):
    """A cache of slots whose rows also hold an encoder's text."""

    encoder_visible: int

    @property
    def encoder_lengths(self) -> Tensor:
        """Lengths [B] of the texts of the rows in use."""
        ...

    def write_encoder(self, layers: Iterable[tuple[Tensor, Tensor]], lengths: Tensor) -> None:
        """Keep keys and values [B, E, heads, D] of every layer, and the `lengths` [B]."""
        ...

    def read_encoder(self) -> list[tuple[Tensor, Tensor]]:
        """Return the visible keys and values [B, heads, E, D] of every layer."""
        ...


@runtime_checkable
class EncodingAdapter(Adapter, Protocol):
    """An `Adapter` that must be shown the encoder's text before the first decoder token."""

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: Any) -> None:
        """Take in the texts `tokens` [B, E], of `lengths` [B] tokens, padded on the right."""
        ...


def check_t5(model: PreTrainedModel) -> None:
    """Raise ValueError unless the decoder of `model` can be told positions from outside."""
    name = model.config.model_type
    if name not in T5_TYPES:
        raise ValueError(
            f"{name}: its decoder takes positions from the length of its cache, which is fixed "
            f"here; of encoder-decoder models, use a T5-type one ({', '.join(T5_TYPES)})"
        )


def both(own: Cache, encoder: list[tuple[Tensor, Tensor]]) -> EncoderDecoderCache:
    """The decoder's cache and the encoder's keys and values, as blocks of T5 look for them."""
    layers: list[Any] = []
    for keys, values in encoder:
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        layers.append(layer)
    return EncoderDecoderCache(own, Cache(layers=layers))


def inside(lengths: Tensor, width: int) -> Tensor:
    """Return [B, width] bool: what is text and no padding.

    A row without text shows its first place, lest its softmax become NaN and stay in its slots.
    """
    return torch.arange(width, device=lengths.device) < lengths.clamp(min=1)[:, None]


def required(encoder: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both, or raise ValueError: the decoder's tokens alone have no probability."""
    if encoder is None or lengths is None:
        raise ValueError(
            "scoring under an encoder-decoder model needs the encoder's ids: "
            "give score(..., encoder=, lengths=)"
        )
    return encoder, lengths


class Seq2SeqAdapter(nn.Module):
    """`EncodingAdapter` for a T5-type model of Hugging Face. Raises ValueError for other types."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int) -> None:
        super().__init__()
        check_t5(model)
        self.model = model
        self.vocab_size = vocab_size
        self.max_positions = 1 << 30  # relative positions have no end
        self._architecture = model.config.to_json_string()  # once: it takes a millisecond
        # T5 1.0 was trained with logits of scaled hidden states, 1.1 and mT5 without.
        scaled = getattr(model.config, "scale_decoder_outputs", False)
        self._scale: float = model.config.d_model**-0.5 if scaled else 1.0
        attention = self._decoder.block[0].layer[0].SelfAttention  # its bias serves all blocks
        self._farthest: int = attention.relative_attention_max_distance
        buckets = attention._relative_position_bucket(
            -torch.arange(self._farthest + 1, device=self.device),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=self._farthest,
        )
        self.register_buffer("_buckets", buckets, persistent=False)  # [distances 0..farthest]

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    @property
    def signature(self) -> Hashable:
        """Architecture, precision, real vocabulary, and a tied head, which the config conceals."""
        tied = self._head.weight is self.model.get_input_embeddings().weight
        return (type(self), self._architecture, self.dtype, self.vocab_size, tied)

    @property
    def is_constant(self) -> bool:
        """Whether no weight is open to training."""
        return not any(weight.requires_grad for weight in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers, tied ones once; the encoder's too."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def width(self) -> int:
        """The hidden size H."""
        return self.model.config.d_model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return next(self.model.parameters()).dtype

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: EncoderCache) -> None:
        """Run the encoder over `tokens` [B, E] of `lengths` [B] >= 1; fill the rows of the cache.

        Padding, on the right, is seen neither by the encoder nor by cross attention.
        """
        cache.write_encoder(self._cross_states(self._encoded(tokens, lengths)), lengths)

    def step(self, tokens: Tensor, *, positions: Tensor, cache: EncoderCache) -> Tensor:
        """Feed `tokens` [B, N] at `positions` [B, N] through the cache; return logits [B, N, V]."""
        hidden = self._decode(tokens, positions, cache) * self._scale
        return self._head(hidden)[..., : self.vocab_size]

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: EncoderCache) -> None:
        """Fill slots `positions` [B, N] of the cache; the head is not run."""
        self._decode(tokens, positions, cache)

    def score(
        self,
        tokens: Tensor,
        keep: Tensor,
        *,
        encoder: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return logits [M, V] at the M true positions of `keep` [B, T] of `tokens` [B, T].

        The head runs on the kept positions only. Raises ValueError without `encoder` [B, E] and
        its `lengths` [B]: there is no score of a decoder's text alone.
        """
        hidden, head = self.hidden_and_head(tokens, encoder=encoder, lengths=lengths)
        return head(hidden[keep])[:, : self.vocab_size]

    def hidden_and_head(
        self, tokens: Tensor, *, encoder: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, nn.Module]:
        """Return the hidden states [B, T, H], scaled, and the head that makes logits of them.

        Raises ValueError without `encoder` [B, E] and its `lengths` [B].
        """
        encoder, lengths = required(encoder, lengths)
        hidden = self._decoder(
            input_ids=tokens,
            encoder_hidden_states=self._encoded(encoder, lengths),
            encoder_attention_mask=inside(lengths, encoder.shape[1]),
            use_cache=False,
        ).last_hidden_state
        return hidden * self._scale, self._head

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        """`copy_weights` into the model; stored encoder texts stay those of the old weights."""
        copy_weights(self.model, state_dict)

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

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

    def _cross_states(self, states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, E, heads, D] that each block makes of the encoder's `states`."""
        for block in self._decoder.block:
            attention = block.layer[1].EncDecAttention
            shape = (*states.shape[:2], attention.n_heads, attention.key_value_proj_dim)
            yield attention.k(states).view(shape), attention.v(states).view(shape)

    def _decode(self, tokens: Tensor, positions: Tensor, cache: EncoderCache) -> Tensor:
        """The last hidden states [B, N, H], normed and not scaled."""
        decoder = self._decoder
        own_bias = self._own_bias(positions, cache.visible)
        encoder_text = inside(cache.encoder_lengths, cache.encoder_visible)
        cross_bias = additive(encoder_text, self.dtype)[:, None, None]  # [B, 1, 1, E]
        caches = both(cache.at(positions), cache.read_encoder())
        hidden = decoder.embed_tokens(tokens)
        for block in decoder.block:
            hidden = block(
                hidden,
                position_bias=own_bias,
                encoder_hidden_states=hidden,  # only says that there are some; see `both`
                encoder_decoder_position_bias=cross_bias,
                past_key_values=caches,
                is_causal=False,  # the biases are masks as well, and whole
            )[0]
        return decoder.final_layer_norm(hidden)

    def _own_bias(self, positions: Tensor, visible: int) -> Tensor:
        """[B, heads, N, C]: the learned bias of each distance; slots after the position masked."""
        attention = self._decoder.block[0].layer[0].SelfAttention
        by_distance = attention.relative_attention_bias(self._buckets)  # [farthest + 1, heads]
        distance = positions[..., None] - torch.arange(visible, device=positions.device)
        bias = by_distance[distance.clamp(0, self._farthest)].permute(0, 3, 1, 2)
        lowest = torch.finfo(bias.dtype).min
        return bias.masked_fill((distance < 0)[:, None], lowest).contiguous()


class PrefixedAdapter(nn.Module):
    """`EncodingAdapter` for a decoder-only draft that reads the encoder's text before its own.

    The decoder's token at position t stands behind the encoder's text for the draft, so its cache
    needs `encoder_capacity` slots more than the target's, and its context is so much shorter.
    """

    def __init__(self, draft: Adapter, *, encoder_capacity: int) -> None:
        super().__init__()
        self.draft = draft
        self.vocab_size = draft.vocab_size
        self.max_positions = draft.max_positions - encoder_capacity

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @property
    def signature(self) -> Hashable:
        """The draft's, read behind a prefix."""
        return (type(self), self.draft.signature)

    @property
    def is_constant(self) -> bool:
        """Whether the draft's weights never change."""
        return self.draft.is_constant

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory of the draft's weights."""
        return self.draft.weight_bytes

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: EncoderCache) -> None:
        """Feed the texts `tokens` [B, E] of `lengths` [B] to the draft, from position 0 on.

        Padding falls into slots that the decoder's tokens overwrite before anything sees them.
        """
        cache.write_encoder((), lengths)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._feed(self.draft.prefill, tokens, positions, cache, tokens.shape[1])

    def step(self, tokens: Tensor, *, positions: Tensor, cache: EncoderCache) -> Tensor:
        """Feed `tokens` [B, N] at decoder `positions` [B, N]; return logits [B, N, V]."""
        return self._feed_behind(self.draft.step, tokens, positions, cache)

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: EncoderCache) -> None:
        """`step` for its effect on the cache alone."""
        self._feed_behind(self.draft.prefill, tokens, positions, cache)

    def score(
        self,
        tokens: Tensor,
        keep: Tensor,
        *,
        encoder: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return logits [M, V] at the M true positions of `keep` [B, T] of `tokens` [B, T].

        Raises ValueError without `encoder` [B, E] and its `lengths` [B].
        """
        encoder, lengths = required(encoder, lengths)
        places = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, T]
        text = torch.cat([encoder, torch.zeros_like(tokens)], dim=1).scatter(1, places, tokens)
        kept = torch.zeros_like(text, dtype=torch.bool).scatter(1, places, keep)
        return self.draft.score(text, kept)

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        """Copy weights of the draft in place."""
        self.draft.load_weights(state_dict)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the draft."""
        return self.draft.weights()

    def _feed_behind(self, feed: Feed, tokens: Tensor, positions: Tensor, cache: Any) -> Any:
        positions = positions + cache.encoder_lengths[:, None]
        return self._feed(feed, tokens, positions, cache, cache.visible + cache.encoder_visible)

    def _feed(
        self, feed: Feed, tokens: Tensor, positions: Tensor, cache: EncoderCache, visible: int
    ) -> Any:
        """Call `feed` with `visible` slots, and leave the decoder's number as it was."""
        decoders, cache.visible = cache.visible, visible
        result = feed(tokens, positions=positions, cache=cache)
        cache.visible = decoders
        return result
