"""One face for models: feed tokens at positions, score a text, hidden states and head.

Decoder, trainer and evaluation see models only through `Adapter`; tests put a float64 tabular
model behind the same face. Rows are always padded on the right and every token carries its
position. With a cache, the token at position t lives in slot t and sees the slots 0..t: rolling
back is using smaller positions again, and what lies in later slots is never seen. The adapter
knows no sampling, no loss and no schedule. Logits are cut to the real vocabulary here, once.

Shapes: B rows, N new tokens, T tokens, C slots attended to, V real vocabulary, H hidden size.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from draftkit.models.cache import SlotCache, Streams
from draftkit.models.parallel import Chains, Packing, Parallel, parallel_of
from draftkit.models.shapes import context_of

ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}
SHAPE_BOUND_TYPES = {"bloom", "gpt_neo"}  # they read positions off the shape of the cache


def parts_of(row: Sequence[int], start: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """What an encoder reads of a row (nothing where `start` is None), and the decoder's text.

    Raises ValueError for a row of an encoder-decoder model that lacks either.
    """
    if start is None:
        return (), row
    if start not in row[1:]:
        raise ValueError(
            f"a row of an encoder-decoder model is a text, id {start} which begins the decoder's, "
            "and what follows"
        )
    at = row.index(start)
    return row[:at], row[at:]


class Adapter(nn.Module, ABC):
    """A language model of Hugging Face, as decoder, trainer and evaluation see it."""

    # The token that begins a decoder's text; None for a decoder-only model. A row of an
    # encoder-decoder model holds both: what the encoder reads, this token, the decoder's text.
    start_id: int | None = None
    reads: tuple[int, ...] = ()  # the target's residual streams that it is fed (`streams`)
    kept_ids: Tensor | None  # [K] ids that it can give, ascending; None: all

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, max_positions: int) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.register_buffer("kept_ids", None, persistent=False)
        # Once, as it takes milliseconds. Names tell a model with LoRA from one without.
        self._architecture = model.config.to_json_string() + "\n".join(model.state_dict())

    @property
    def signature(self) -> Hashable:
        """Models of one signature differ in the values of their weights only."""
        return (type(self), self._architecture, self.dtype, self.vocab_size)

    @property
    def parallel(self) -> Parallel | None:
        """How it proposes several tokens in one pass; None for a plain drafter, and a target."""
        return parallel_of(self.model.config)

    @property
    def blocks(self) -> int:
        """Proposals of a chain that it was trained for; 1 where it reads its own like any text."""
        return 1 if self.parallel is None else self.parallel.blocks

    @property
    def is_constant(self) -> bool:
        """Whether no weight is open to training, as `load_target` leaves them."""
        return not any(weight.requires_grad for weight in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers, tied ones once."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def width(self) -> int:
        """The hidden size H."""
        return self.model.config.get_text_config().hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the model's weights, where tokens must be."""
        return next(self.model.parameters()).device

    def rebuilt(self) -> "Adapter":
        """A new adapter of the same model, after its modules or configuration have changed."""
        build: Any = type(self)
        return build(self.model, vocab_size=self.vocab_size, kept_ids=self.kept_ids)

    @property
    def has_encoder(self) -> bool:
        """Whether `encode` must be shown a text before the first decoder token."""
        return self.start_id is not None

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: SlotCache) -> None:
        """Take in the texts `tokens` [B, E], of `lengths` [B] tokens, padded on the right."""
        raise ValueError("this model has no encoder, so that there is nothing to read for it")

    @abstractmethod
    def step(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache, last: int = 0) -> Tensor:
        """Feed `tokens` [B, N] at `positions` [B, N] through the cache; return logits [B, N, V].

        Where `last` is not 0 the head is run on the last so many tokens alone: [B, last, V].
        """

    @abstractmethod
    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache) -> None:
        """Fill slots `positions` [B, N] of the cache; the head is not run."""

    def score(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Return logits [M, V] at the M true positions of `keep` [B, T] of `tokens` [B, T].

        The head runs on the kept positions only. Rows are padded on the right, so padding is
        never seen by a kept position and needs no mask.
        """
        states, head = self.states(tokens, keep), self.head
        return states if head is None else head(states)

    @abstractmethod
    def states(self, tokens: Tensor, keep: Tensor, packing: Packing | None = None) -> Tensor:
        """What `head` makes logits of at the M positions of `keep`: [M, H].

        Where `head` is None these are the logits [M, V] themselves. packing: of a parallel draft.
        """

    @property
    @abstractmethod
    def head(self) -> "Head | None":
        """The output head, where logits are nothing but what it makes of the last states."""

    def read(
        self, tokens: Tensor, keep: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """`states`, and beside them the residual streams of `layers`, joined: [B, T, F].

        Raises ValueError for a model that does not show its layers.
        """
        if not layers:
            return self.states(tokens, keep), None
        raise ValueError(f"{type(self).__name__} shows no hidden states")

    def forward(self, entries: Chains, features: Tensor | None = None) -> Tensor:
        """The states [N, H] of `entries`: data-parallel wrappers see the forward pass of training.

        features: the target's residual streams [B, T, F], where the draft `reads` some.
        """
        return self.states(entries.tokens, entries.keep, entries.packing)

    def renew(self) -> None:
        """Follow weights that were changed in place by others, as in training."""

    def weights(self) -> dict[str, Tensor]:
        """What `load_weights` writes, by name: the tensors themselves, no copies."""
        return self.model.state_dict()

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        """Copy `state_dict` of the same model in place, so that compiled code keeps its buffers.

        Raises ValueError as `by_name` does, before anything is copied.
        """
        own = self.weights()
        with torch.no_grad():
            for name, weight in by_name(own, state_dict).items():
                own[name].copy_(weight)
        self.renew()


def by_name(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensor of `given` for each of `own`; for tied ones, which share memory, one is enough.

    Raises ValueError naming the first that is unknown, missing, of another shape or kind.
    """
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(f"the drafter has no {unknown[0]}")
    tied = {(own[name].data_ptr(), own[name].shape): tensor for name, tensor in given.items()}
    wanted = {}
    for name, tensor in own.items():
        new = given.get(name, tied.get((tensor.data_ptr(), tensor.shape)))
        if new is None:
            raise ValueError(f"{name} is missing")
        if new.shape != tensor.shape:
            raise ValueError(f"{name} is {list(new.shape)}, the drafter's {list(tensor.shape)}")
        if new.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{name} holds {new.dtype}, the drafter's {tensor.dtype}")
        wanted[name] = new
    return wanted


class Head(NamedTuple):
    """Makes logits [..., V] of states [..., H]: states @ weight.T + bias.

    With `kept_ids` [K] it has the rows of these ids only, and all other logits are -inf. No frozen
    dataclass: torch 2.11 loses the fields of one that a compiled tree makes at each depth.
    """

    weight: Tensor  # [V, H], real vocabulary only, or [K, H]
    bias: Tensor | None  # [V] or [K]
    kept_ids: Tensor | None = None
    vocab_size: int = 0  # V; needed where ids are kept

    def __call__(self, states: Tensor) -> Tensor:
        logits = functional.linear(states, self.weight, self.bias)
        return logits if self.kept_ids is None else widened(logits, self.kept_ids, self.vocab_size)


def check_cache(model: PreTrainedModel) -> None:
    """Raise ValueError unless `model` attends through masks and positions to slots of a cache."""
    config = model.config.get_text_config()
    name = model.config.model_type
    stateful = sorted(set(getattr(config, "layer_types", None) or ()) - ROLLBACK_LAYERS)
    if stateful or model._is_stateful:
        kind = f" of type {', '.join(stateful)}" if stateful else ""
        raise ValueError(
            f"{name}: layers{kind} keep a state that cannot be rolled back after a rejection; "
            "use an attention-only model"
        )
    if config.model_type in SHAPE_BOUND_TYPES or getattr(config, "alibi", False):
        raise ValueError(
            f"{name}: it takes positions from the length of its cache, which is fixed here; "
            "use a model with rotary or learned positions"
        )


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores: 0 where allowed, else the lowest finite number."""
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)


def widened(logits: Tensor, kept_ids: Tensor, vocab_size: int) -> Tensor:
    """Return [..., V]: the logits [..., K] at their `kept_ids` [K], and -inf elsewhere."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy(-1, kept_ids, logits)


def cache_argument(module: nn.Module) -> str:
    """The name that `module` declares for its cache: `cache` from transformers 5.24 on.

    The other name must not be tried: before 5.24 `cache` vanishes among keyword arguments that
    nobody reads, and later the old one warns.
    """
    declared = inspect.signature(module.forward).parameters
    return "cache" if "cache" in declared else "past_key_values"


class CausalAdapter(Adapter):
    """`Adapter` for a decoder-only model.

    Losses make logits of the states themselves, a few tokens at a time. With `kept_ids` [K]
    (ascending) all other logits are -inf, and a plain head is computed on these rows only.
    Raises ValueError for models whose cache cannot roll back (recurrent or convolution state) or
    cannot be used slot by slot.
    """

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int, kept_ids: Tensor | None = None
    ) -> None:
        check_cache(model)
        config = model.config.get_text_config()
        super().__init__(model, vocab_size=vocab_size, max_positions=context_of(model.config))
        self._window: int | None = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self.kept_ids = None if kept_ids is None else kept_ids.to(self.device)
        self._kept_head: Head | None = None
        self._chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._model_takes, self._stack_takes = map(cache_argument, (model, model.base_model))
        self._streams = Streams(model)
        self.renew()

    @property
    def signature(self) -> Hashable:
        return (super().signature, None if self.kept_ids is None else len(self.kept_ids))

    def step(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache, last: int = 0) -> Tensor:
        if self._kept_head is not None:
            stack = self.model.base_model
            outputs = self._pass(stack, self._stack_takes, tokens, positions, cache)
            return self._kept_head(outputs.last_hidden_state[:, -last:])
        more = {"logits_to_keep": last} if self._chooses_logits else {}
        outputs = self._pass(self.model, self._model_takes, tokens, positions, cache, **more)
        return self._cut(outputs.logits[:, -last:])

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: SlotCache) -> None:
        self._pass(self.model.base_model, self._stack_takes, tokens, positions, cache)

    def _pass(
        self,
        module: Any,
        argument: str,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        **more: int,
    ) -> Any:
        """What `module` makes of tokens through the cache: that at position t sees the slots 0..t.

        argument: what the module names its cache, as `cache_argument` tells. The cache keeps the
        residual streams that it taps.
        """
        # Beyond the context is garbage, at legal positions.
        positions = positions.clamp(max=self.max_positions - 1)
        slots, behind, seen = cache.reading(positions)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": self._masks(behind, seen),
            argument: cache.at(slots),
            "use_cache": True,
            **more,
        }
        if not cache.taps:
            return module(**inputs)
        self._streams.open(cache.taps)
        outputs = module(**inputs)
        for layer, states in self._streams.close().items():
            cache.keep(layer, states)
        return outputs

    def read(
        self, tokens: Tensor, keep: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        self._streams.open(layers)
        states = self.states(tokens, keep)
        caught = self._streams.close()
        return states, torch.cat([caught[layer] for layer in layers], -1) if layers else None

    def states(self, tokens: Tensor, keep: Tensor, packing: Packing | None = None) -> Tensor:
        # A model that does more than its head (soft-capped or scaled logits) has none.
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if packing is not None:
            inputs["position_ids"] = packing.positions
            inputs["attention_mask"] = self._masks(*packing.seen())
        if not self._head_is_plain:
            return self._cut(self.model(**inputs).logits[keep])
        return self.model.base_model(**inputs).last_hidden_state[keep]

    @property
    def head(self) -> Head | None:
        if not self._head_is_plain:
            return None
        module: Any = self.model.get_output_embeddings()
        rows = slice(self.vocab_size) if self.kept_ids is None else self.kept_ids
        bias = None if module.bias is None else module.bias[rows]
        return Head(module.weight[rows], bias, self.kept_ids, self.vocab_size)

    def renew(self) -> None:
        """Copies the kept rows of a plain head to where `step` reads them: selecting rows costs
        more than using them. In place, as compiled code knows the copy by its address.
        """
        if self.kept_ids is None:
            return
        # Not as inference tensors, which could be written to in inference mode alone.
        with torch.inference_mode(False), torch.no_grad():
            fresh, kept = self.head, self._kept_head
            if fresh is None or kept is None:
                self._kept_head = fresh
                return
            kept.weight.copy_(fresh.weight)
            if kept.bias is not None and fresh.bias is not None:
                kept.bias.copy_(fresh.bias)

    def _cut(self, logits: Tensor) -> Tensor:
        """The model's own logits [..., padded V] of the ids that count."""
        if self.kept_ids is None:
            return logits[..., : self.vocab_size]
        return widened(logits[..., self.kept_ids], self.kept_ids, self.vocab_size)

    @cached_property
    def _head_is_plain(self) -> bool:
        """Whether logits are head(hidden).

        The head must be given the last hidden states, and loud numbers in place of what it puts
        out must come through the model unchanged. (Comparing logits would miss a cap or a scale
        where they are small or 0, as after the zero embedding of a padding id.)
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return False
        given: list[Tensor] = []
        loud: list[Tensor] = []

        def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            given.append(inputs[0])
            ramp = torch.linspace(-1000, 1000, output.numel(), device=output.device)
            loud.append(ramp.to(output.dtype).view_as(output))
            return loud[0]

        tokens = torch.arange(min(8, self.vocab_size), device=self.device)[None]
        training = self.model.training
        self.model.eval()
        handle = head.register_forward_hook(replace)
        try:
            with torch.no_grad():
                logits = self.model(input_ids=tokens, use_cache=False).logits
                stack = self.model.base_model(input_ids=tokens, use_cache=False)
        finally:
            handle.remove()
            self.model.train(training)
        hidden = stack.last_hidden_state
        return torch.equal(given[0], hidden) and torch.equal(loud[0].to(logits.dtype), logits)

    def _masks(self, behind: Tensor, seen: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks of the layers, with and without a sliding window.

        behind: how far back a token is; seen [..., N, C]: whether it may be seen at all.
        """
        if self._window is None or self._layer_types == {"full_attention"}:
            return additive(seen, self.dtype)
        near = additive(seen & (behind < self._window), self.dtype)
        if len(self._layer_types) < 2:
            return near
        return {"full_attention": additive(seen, self.dtype), "sliding_attention": near}
