"""Heads on the target's hidden states: EAGLE-3, the same head in one pass, and Medusa.

A head reads what the target has computed of a text (`streams`), joined to one vector f_t a token,
the *features*. Of an EAGLE-3 head (2503.01840) slot t of its cache is made of the token x_t and the
features f_(t-1) of the one before it, and predicts x_(t+1). There is no slot 0. The state a of a
slot, before the last norm, stands for the features of a token that the target has not read yet:

    g = fc(f_(t-1)), or a of the step before        u = [norm(embedding(x_t)); norm(g)]
    a = g + attention(u);  a = a + mlp(norm(a))     logits = lm_head(norm(a))

In one pass (P-EAGLE 2602.01469) masks stand behind the text as in `parallel`, with a learned vector
in place of their features. Heads of Medusa (2401.10774) have neither tokens nor attention: head b
makes f + silu(W_b f + c_b) of the last features f_(t-1), and predicts x_(t+1+b).

Training runs the steps of a chain from every token at once (`unrolled`): index t at step k reads
x_(t+k) and its own state of step k - 1, and sees the slots of the text up to t and its own later
ones. So is the law of the proposal k + 1 behind t, given that the ones before it were accepted.

Files are those that engines load: `LlamaForCausalLMEagle3`, embeddings left out, draft ids as
`d2t`, target id minus draft id.

Shapes: B rows, N new tokens, T tokens, C slots, F width of the features, H hidden size, U draft
ids, V real vocabulary, S steps, M entries.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftkit.config.text import HEADS
from draftkit.models.adapter import Adapter, Head, additive
from draftkit.models.attention import attention, unrolled_attention
from draftkit.models.cache import SlotCache
from draftkit.models.parallel import Chains, Packing, declare, parallel_of
from draftkit.models.shapes import layer_count, layer_stack

EAGLE3, MEDUSA = HEADS  # of `draft.kind`
STEPS = "draftkit_steps"  # of config.json: proposals of a chain that a head was trained for
FOREIGN_STEPS = 4  # where another trainer does not say
FEWEST_LAYERS = 7  # of a target, lest two of the layers that are read be one
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value: what is attended to


def layers_read(kind: str, count: int) -> tuple[int, ...]:
    """The streams that a head of `kind` reads of a target of `count` layers, ascending.

    Raises ValueError for too few.
    """
    if kind == MEDUSA:
        return (count,)
    if count < FEWEST_LAYERS:
        raise ValueError(
            f"draft.kind={kind}: the target has {count} layers, and a head reads three of at least "
            f"{FEWEST_LAYERS}: use draft.kind=plain or medusa"
        )
    return (2, count // 2, count - 3)


class HeadModel(PreTrainedModel):
    """What heads have in common: an output head over the draft ids, and borrowed embeddings."""

    config_class = LlamaConfig
    kind: str  # of `draft.kind`
    lm_head: nn.Linear
    generation_config: Any = None  # it generates nothing

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self._borrowed: list[nn.Module] = []  # in a list: no part of it

    def get_input_embeddings(self) -> Any:
        """The target's, frozen; or its own, where its folder has others."""
        return getattr(self, "embed_tokens", None) or self._borrowed[0]

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class LlamaForCausalLMEagle3(HeadModel):
    """An EAGLE-3 head of one layer, by the name that engines know."""

    kind = EAGLE3

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        features = 3 * (getattr(config, "target_hidden_size", None) or size)
        self.fc = nn.Linear(features, size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = Norm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        if parallel_of(config) is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, features))
        self.post_init()


class Norm(nn.RMSNorm):
    """RMSNorm in the precision of what it is given, also beside weights of another."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, None, self.eps) * self.weight


class HeadLayer(nn.Module):
    """The layer of an EAGLE-3 head: Llama's, on embedding and features side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, wide = config.hidden_size, 2 * config.hidden_size
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(wide, heads * self.head_dim, bias=False),
                "k_proj": nn.Linear(wide, shared * self.head_dim, bias=False),
                "v_proj": nn.Linear(wide, shared * self.head_dim, bias=False),
                "o_proj": nn.Linear(heads * self.head_dim, size, bias=False),
            }
        )
        self.mlp = LlamaMLP(config)
        eps = config.rms_norm_eps
        self.input_layernorm = Norm(size, eps=eps)  # on the embedding
        self.hidden_norm = Norm(size, eps=eps)  # on the features
        self.post_attention_layernorm = Norm(size, eps=eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """The states a [B, N, H] of tokens `embedded` beside `hidden`, both [B, N, H]."""
        query, key, value = self._projected(embedded, hidden, "q_proj", "k_proj", "v_proj")
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        mixed = attend(query, key, value)  # [B, N, heads, D]
        state = hidden + self.self_attn["o_proj"](mixed.flatten(2))
        return state + self.mlp(self.post_attention_layernorm(state))

    def keys_and_values(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What others see of such tokens: both [B, heads, N, D]."""
        key, value = self._projected(embedded, hidden, "k_proj", "v_proj")
        return apply_rotary_pos_emb(key, key, *rotary)[1], value

    def _projected(self, embedded: Tensor, hidden: Tensor, *names: str) -> Iterator[Tensor]:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        for name in names:
            yield self.self_attn[name](both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MedusaHeads(HeadModel):
    """K residual heads, which share one output head."""

    kind = MEDUSA

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.blocks = nn.ModuleList([nn.Linear(size, size) for _ in range(config.medusa_heads)])
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()
        for weight in self.blocks.parameters():  # each begins as the identity
            nn.init.zeros_(weight)


OF_KIND: dict[str, type[HeadModel]] = {
    one.kind: one for one in (LlamaForCausalLMEagle3, MedusaHeads)
}
HEAD_MODELS = {one.__name__: one for one in OF_KIND.values()}
HEAD_MODELS |= dict.fromkeys(  # names that other trainers write
    ("Eagle3LlamaForCausalLM", "PEagleDraftModel", "PeagleLlamaForCausalLM"), LlamaForCausalLMEagle3
)


def head_class(config: PreTrainedConfig) -> type[HeadModel] | None:
    """The class of a head by its configuration; None for a language model."""
    return HEAD_MODELS.get((config.architectures or [""])[0])


def head_config(target: PreTrainedConfig, kind: str, *, draft_ids: int, **more: Any) -> LlamaConfig:
    """The configuration of a head of `kind` on a target: its shapes, and `draft_ids` U."""
    text: Any = target.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    heads = text.num_attention_heads
    make: Any = LlamaConfig
    return make(
        architectures=[OF_KIND[kind].__name__],
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_ids,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 4 * text.hidden_size),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(rope) if rope and "rope_theta" in rope else None,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        **more,
    )


def new_head(target: PreTrainedModel, config: LlamaConfig, kept_ids: Tensor | None) -> HeadModel:
    """A head of `config` in float32, with what it can take of `target`'s weights.

    kept_ids: the draft ids [U], ascending; None: all. Its features are those of the last layer that
    it reads, its layer is the target's last, blind to tokens; Medusa's heads begin as the identity.
    What the target's family has otherwise stays random.
    """
    made: Any = head_class(config)
    head = made._from_config(config, dtype=torch.float32)
    if kept_ids is not None:
        head.d2t.copy_(kept_ids - torch.arange(len(kept_ids)))
    with torch.no_grad():
        for own, given in _shared_weights(head, target, kept_ids):
            if own.shape == given.shape:
                own.copy_(given)
    return head


def left_random(head: HeadModel, target: PreTrainedModel, kept_ids: Tensor | None) -> list[str]:
    """The names of the weights for which `new_head` finds none in the family of `target`."""
    pairs = _shared_weights(head, target, kept_ids)
    taken = {id(own) for own, given in pairs if own.shape == given.shape}
    own = [] if isinstance(head, MedusaHeads) else head.named_parameters()
    return [name for name, weight in own if id(weight) not in taken and name != "mask_hidden"]


def _shared_weights(
    head: Any, target: Any, kept_ids: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights of `head`, each with what it begins with."""
    size = head.config.hidden_size
    rows: Tensor = target.get_output_embeddings().weight
    yield head.lm_head.weight, rows if kept_ids is None else rows[kept_ids.to(rows.device)]
    if not isinstance(head, LlamaForCausalLMEagle3):
        return
    (layer,) = head.layers
    fc = head.fc.weight
    yield fc, torch.cat([fc.new_zeros(size, fc.shape[1] - size), torch.eye(size)], 1)
    last: Any = layer_stack(target)[1][-1]
    weights = dict(last.named_parameters())
    for name, own in layer.named_parameters():
        source = {"hidden_norm.weight": "input_layernorm.weight"}.get(name, name)
        if (given := weights.get(source)) is None:
            continue
        if own.dim() == 2 and own.shape[1] == 2 * given.shape[1]:
            given = torch.cat([torch.zeros_like(given), given], 1)
        yield own, given
    if (norm := getattr(target.base_model, "norm", None)) is not None:
        yield head.norm.weight, norm.weight


class HeadAdapter(Adapter):
    """`Adapter` of a head. Without the target's features none of it runs."""

    model: Any

    def __init__(
        self, model: HeadModel, *, vocab_size: int, reads: tuple[int, ...], max_positions: int
    ) -> None:
        super().__init__(model, vocab_size=vocab_size, max_positions=max_positions)
        self.reads = reads
        if hasattr(model, "d2t"):
            self.kept_ids = torch.zeros_like(self.model.d2t)
            self.renew()

    @property
    def signature(self) -> Hashable:
        return (super().signature, self.reads)

    @property
    def blocks(self) -> int:
        if self.parallel is not None:
            return self.parallel.blocks
        steps = getattr(self.model.config, STEPS, FOREIGN_STEPS)
        return int(getattr(self.model.config, "medusa_heads", steps))

    def rebuilt(self) -> Adapter:
        own = {"vocab_size": self.vocab_size, "max_positions": self.max_positions}
        return type(self)(self.model, reads=self.reads, **own)

    def taught(self, blocks: int) -> Adapter:
        """The same head, to be trained for chains of `blocks`."""
        if self.parallel is None:
            setattr(self.model.config, STEPS, blocks)
        else:
            declare(self.model.config, self.parallel._replace(blocks=blocks))
        return self.rebuilt()

    def renew(self) -> None:
        if self.kept_ids is not None:  # of other weights there may be others
            offsets: Any = self.model.d2t
            torch.add(offsets, torch.arange(len(offsets), device=offsets.device), out=self.kept_ids)

    @property
    def head(self) -> Head:
        weight = self.model.lm_head.weight
        if self.kept_ids is None:
            return Head(weight[: self.vocab_size], None)
        return Head(weight, None, self.kept_ids, self.vocab_size)

    def step(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache, last: int = 0) -> Tensor:
        raise ValueError("a head proposes on the target's hidden states, and writes no text alone")

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache) -> None:
        raise ValueError("a head proposes on the target's hidden states, and reads no text alone")

    def states(self, tokens: Tensor, keep: Tensor, packing: Packing | None = None) -> Tensor:
        raise ValueError("a head proposes on the target's hidden states, and scores no text alone")


class MedusaAdapter(HeadAdapter):
    """K proposals of the features alone."""

    def made_of(self, features: Tensor, block: int) -> Tensor:
        """The states [..., H] of head `block` on `features` [..., H]."""
        features = features.to(self.dtype)
        return features + functional.silu(self.model.blocks[block](features))

    def forward(self, entries: Chains, features: Tensor | None = None) -> Tensor:
        assert features is not None
        before = _shifted(features)
        return torch.cat([self.made_of(before[keep], b) for b, keep in enumerate(entries.keep)])


class Eagle3Adapter(HeadAdapter):
    """An EAGLE-3 head, which proposes token by token, or in one pass where it has `mask_hidden`."""

    def project(self, features: Tensor) -> Tensor:
        """fc(f): [..., H] of features [..., F]."""
        return self.model.fc(features.to(self.model.fc.weight.dtype))

    @property
    def mask_features(self) -> Tensor:
        """What masks have in place of features: [F]."""
        return self.model.mask_hidden[0]

    def feed(
        self, tokens: Tensor, hidden: Tensor, *, positions: Tensor, cache: SlotCache, last: int = 0
    ) -> Tensor:
        """Fill slots `positions` [B, N] with `tokens` [B, N] beside `hidden` [B, N, H].

        Returns the states a [B, last or N, H], of which `logits` are made.
        """
        positions = positions.clamp(max=self.max_positions - 1)
        slots, _, seen = cache.reading(positions)
        seen = seen & (torch.arange(cache.visible, device=positions.device) > 0)
        mask, target = additive(seen, self.dtype), cache.at(slots)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attention(query, *target.update(key, value, 0), mask)

        return self._layer(tokens, hidden, positions, attend)[:, -last:]

    def fill(self, tokens: Tensor, hidden: Tensor, *, positions: Tensor, cache: SlotCache) -> None:
        """`feed` where no state is asked for: one layer's keys and values need no attention."""
        positions = positions.clamp(max=self.max_positions - 1)
        cache.at(positions).update(*self._keys_and_values(tokens, hidden, positions), 0)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of the states a [..., H]."""
        return self.head(self.model.norm(states))

    def forward(self, entries: Chains, features: Tensor | None = None) -> Tensor:
        assert features is not None
        packing = entries.packing
        if packing is None:
            states = torch.cat([*self._unrolled(entries.tokens, features, entries.keep)])
            return self.model.norm(states)
        # Rows [B, L] with the masks of their chains (`parallel.chains`).
        _, seen = packing.seen()
        seen = seen & (packing.positions > 0)[:, None, None, :]
        before = (packing.positions - 1).clamp(min=0)[..., None].expand(-1, -1, features.shape[-1])
        given = features.gather(1, before).to(self.dtype)
        if packing.blocks is not None:
            given = torch.where((packing.blocks > 0)[..., None], self.mask_features, given)
        hidden = self.project(given)
        attend = partial(self._attention, mask=additive(seen, hidden.dtype))
        states = self._layer(entries.tokens, hidden, packing.positions, attend)[entries.keep]
        return self.model.norm(states)

    def _unrolled(self, tokens: Tensor, features: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """The states a of the entries of each step. keep: [S, B, T].

        Only columns in which a chain begins are run. Of a prompt before them keys and values do.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        begins = keep[0].any(0).nonzero()
        span = slice(int(begins.min()), int(begins.max()) + 1) if len(begins) else slice(0, 1)
        prompt, known = slice(span.start), index[: span.stop]
        hidden = self.project(_shifted(features)[:, : span.stop])
        mask = additive(((known[span, None] >= known) & (known > 0))[None, None], hidden.dtype)
        ahead = self._keys_and_values(tokens[:, prompt], hidden[:, prompt], index[None, prompt])
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not keys:
                key, value = (torch.cat(both, 2) for both in zip(ahead, (key, value), strict=True))
            keys.append(key)
            values.append(value)
            if len(keys) == 1:
                return self._attention(query, key, value, mask)
            return unrolled_attention(query, keys, values, mask=mask)

        state = hidden[:, span]
        for step, kept in enumerate(keep):
            read = functional.pad(tokens[:, step:], (0, step))[:, span]
            state = self._layer(read, state, (index + step)[None, span], attend)
            yield state[kept[:, span]]

    def _layer(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded, rotary = self._embedded(tokens, hidden, positions)
        return self.model.layers[0](embedded, hidden, rotary, attend)

    def _keys_and_values(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded, rotary = self._embedded(tokens, hidden, positions)
        return self.model.layers[0].keys_and_values(embedded, hidden, rotary)

    def _embedded(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded = self.model.get_input_embeddings()(tokens).to(hidden.dtype)
        return embedded, self.model.rotary(hidden, positions)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        module, scaling = self.model.layers[0].self_attn, query.shape[-1] ** -0.5
        module.num_key_value_groups = query.shape[1] // key.shape[1]
        return attention(module, query, key, value, mask.to(query.dtype), scaling=scaling)[0]


def _shifted(features: Tensor) -> Tensor:
    """The features [B, T, F] of the token before each; of the first its own, which nobody uses."""
    return torch.cat([features[:, :1], features[:, :-1]], 1)


def adapted(model: HeadModel, *, target: Adapter) -> HeadAdapter:
    """The face of a head beside its `target`, whose embeddings it borrows where it has none."""
    if not model._borrowed:
        model._borrowed = [target.model.get_input_embeddings()]
    made = {EAGLE3: Eagle3Adapter, MEDUSA: MedusaAdapter}[model.kind]
    reads = layers_read(model.kind, layer_count(target.model.config))
    own = {"vocab_size": target.vocab_size, "max_positions": target.max_positions}
    return made(model, reads=reads, **own)
