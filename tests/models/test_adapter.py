"""The adapter against the model itself: cached steps, scores, heads, padding, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    GPTNeoConfig,
    GraniteConfig,
    Lfm2Config,
    PreTrainedConfig,
    RwkvConfig,
)

from draftkit.models.adapter import CausalAdapter, Packing
from draftkit.models.cache import SlotCache
from draftkit.models.parallel import Chains
from tests import tiny

# Weights and attention are float64, but models compute norms and rotations in float32.
ATOL = 1e-5
architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


@architectures
@torch.no_grad()
def test_ragged_steps_with_rollback_equal_the_model_without_a_cache(architecture: str) -> None:
    adapter = tiny.adapter(architecture, dtype=torch.float64)
    tokens = tiny.tokens(3, 30)
    expected = tiny.logits(adapter.model, tokens)
    cache = SlotCache(5, 40)
    rows = torch.tensor([4, 0, 2])
    start = torch.tensor([3, 12, 9])  # rows are at different positions all the way

    def at(first: Tensor, width: int) -> Tensor:
        return first[:, None] + torch.arange(width)

    for row, first in enumerate(start.tolist()):
        positions = torch.arange(first)[None]
        adapter.prefill(
            tokens[row : row + 1, :first],
            positions=positions,
            cache=cache.select(rows[row : row + 1], visible=first),
        )
    for width in (4, 1, 2, 5, 1, 3):
        positions = at(start, width)
        used = cache.select(rows, visible=int(start.max()) + width + 2)
        garbage = (tokens.gather(1, at(start, width + 2)) + 7) % 256
        adapter.step(garbage, positions=at(start, width + 2), cache=used)  # a rejected proposal
        logits = adapter.step(tokens.gather(1, positions), positions=positions, cache=used)
        index = positions[..., None].expand(-1, -1, logits.shape[-1])
        torch.testing.assert_close(logits, expected.gather(1, index), atol=ATOL, rtol=0)
        fed = tokens.gather(1, positions)
        ending = adapter.step(fed, positions=positions, cache=used, last=min(2, width))
        assert ending.shape == (3, min(2, width), logits.shape[-1])
        torch.testing.assert_close(ending, logits[:, -2:], atol=ATOL, rtol=0)
        start = start + width


@architectures
@torch.no_grad()
def test_scores_of_kept_positions_equal_the_model_whatever_lies_to_the_right(
    architecture: str,
) -> None:
    adapter = tiny.adapter(architecture, dtype=torch.float64)
    tokens = tiny.tokens(3, 24)
    lengths = torch.tensor([24, 5, 13])
    inside = torch.arange(24) < lengths[:, None]
    keep = inside & (torch.arange(24) % 3 != 1)
    padded = tokens.masked_fill(~inside, 257)
    scores = adapter.score(padded, keep)
    expected = [
        tiny.logits(adapter.model, tokens[row : row + 1, :n])[0][keep[row, :n]]
        for row, n in enumerate(lengths.tolist())
    ]
    torch.testing.assert_close(scores, torch.cat(expected), atol=ATOL, rtol=0)
    states = adapter.states(padded, keep)
    none = tokens.new_zeros(0)  # what data-parallel wrappers call
    assert torch.equal(adapter(Chains(padded, keep, None, none, none)), states)
    assert (adapter.head is None) == (architecture == "gemma2")  # its logits are soft-capped


SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,  # whose embedding is zero, and so are its logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@architectures
@torch.no_grad()
def test_packed_texts_are_scored_as_they_are_alone(architecture: str) -> None:
    adapter = tiny.adapter(architecture, dtype=torch.float64)
    texts = [tiny.tokens(1, length)[0] for length in (9, 1, 14)]
    row = torch.cat([*texts, torch.zeros(4, dtype=torch.long)])[None]
    packing = Packing(
        positions=torch.cat([*(torch.arange(len(text)) for text in texts), torch.zeros(4)])[
            None
        ].long(),
        segments=torch.tensor([[1] * 9 + [2] + [3] * 14 + [0] * 4]),
    )
    found = adapter.states(row, packing.segments > 0, packing)
    alone = [adapter.states(text[None], torch.ones(1, len(text)).bool()) for text in texts]
    torch.testing.assert_close(found, torch.cat(alone), atol=ATOL, rtol=0)
    mixed = adapter.states(row, packing.segments > 0)
    assert not torch.allclose(found[9:], mixed[9:], atol=1e-3)


@pytest.mark.parametrize(
    "config",
    [Cohere2Config(logit_scale=0.25, **SHAPE), GraniteConfig(logits_scaling=4.0, **SHAPE)],
    ids=["cohere2", "granite"],
)
@torch.no_grad()
def test_scaled_logits_are_scored_and_stepped_whole(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().double()
    adapter = CausalAdapter(model, vocab_size=32)
    tokens = tiny.tokens(2, 9) % 32
    expected = tiny.logits(model, tokens)
    assert adapter.head is None
    scores = adapter.score(tokens, torch.ones(2, 9, dtype=torch.bool))
    torch.testing.assert_close(scores, expected.flatten(0, 1), atol=ATOL, rtol=0)
    positions = torch.arange(9).expand(2, 9)
    stepped = adapter.step(tokens, positions=positions, cache=SlotCache(2, 16))
    torch.testing.assert_close(stepped, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-3])
@torch.no_grad()
def test_a_soft_cap_is_found_however_small_the_logits_are(scale: float) -> None:
    adapter = tiny.adapter("gemma2", dtype=torch.bfloat16)
    for weight in adapter.parameters():
        weight.mul_(scale)
    assert adapter.head is None


def test_looking_at_the_head_leaves_the_mode_of_the_model_alone() -> None:
    for training in (True, False):
        adapter = tiny.adapter()
        adapter.train(training)
        assert adapter.head is not None
        assert adapter.model.training is training


def test_scores_carry_gradients_to_every_weight() -> None:
    adapter = tiny.adapter()
    adapter.score(tiny.tokens(2, 6), torch.ones(2, 6, dtype=torch.bool)).square().sum().backward()
    assert all(weight.grad is not None for weight in adapter.parameters())


# Vocabulary padding


@torch.no_grad()
def padded_copy(adapter: CausalAdapter, rows: int) -> CausalAdapter:
    """The same model with `rows` embedding rows; the padding is loud."""
    copied = tiny.model(vocab_size=rows, dtype=torch.float64)
    weights = adapter.model.state_dict()
    for name, weight in copied.state_dict().items():
        if weight.shape != weights[name].shape:
            weight.normal_(std=20.0)
        weight[: len(weights[name])] = weights[name]
    return CausalAdapter(copied, vocab_size=adapter.vocab_size)


@torch.no_grad()
def test_scores_and_steps_are_cut_to_the_real_vocabulary() -> None:
    plain = tiny.adapter(dtype=torch.float64)
    adapter = padded_copy(plain, 320)
    tokens = tiny.tokens(2, 5)
    keep = torch.ones(2, 5, dtype=torch.bool)
    expected = tiny.logits(plain.model, tokens)
    torch.testing.assert_close(adapter.score(tokens, keep), expected.flatten(0, 1))
    positions = torch.arange(5).expand(2, 5)
    stepped = adapter.step(tokens, positions=positions, cache=SlotCache(2, 8))
    torch.testing.assert_close(stepped, expected, atol=ATOL, rtol=0)
    ending = adapter.step(tokens, positions=positions, cache=SlotCache(2, 8), last=1)
    torch.testing.assert_close(ending, stepped[:, -1:])
    soft_capped = CausalAdapter(tiny.model("gemma2", vocab_size=300), vocab_size=258)
    assert soft_capped.score(tokens, keep).shape == (10, 258)


# Weights


def test_loaded_weights_are_the_new_ones_in_the_old_tensors() -> None:
    adapter = tiny.adapter()
    places = [weight.data_ptr() for weight in adapter.parameters()]
    new = tiny.model(seed=5)
    adapter.load_weights(new.state_dict())
    assert [weight.data_ptr() for weight in adapter.parameters()] == places
    tokens = tiny.tokens(1, 6)
    assert torch.equal(tiny.logits(adapter.model, tokens), tiny.logits(new, tokens))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({NORM: None}, f"{NORM} is missing"),
        ({NORM: torch.ones(65)}, rf"{NORM} is \[65\], the drafter's \[64\]"),
        ({NORM: torch.ones(64).long()}, f"{NORM} holds torch.int64, the drafter's torch.float32"),
        ({"another": torch.ones(1)}, "the drafter has no another"),
    ],
    ids=["missing", "reshaped", "of another kind", "unknown"],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(
    changes: dict[str, Tensor | None], reason: str
) -> None:
    adapter = tiny.adapter()
    before = {name: weight.clone() for name, weight in adapter.weights().items()}
    new = tiny.model(seed=5).state_dict() | changes
    with pytest.raises(ValueError, match=reason):
        adapter.load_weights({name: weight for name, weight in new.items() if weight is not None})
    assert all(torch.equal(before[name], weight) for name, weight in adapter.weights().items())


# Refusals

FEW: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "convolution": (
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
        "lfm2: layers of type conv keep a state",
    ),
    "recurrent without named layers": (
        RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2),
        "rwkv: layers keep a state",
    ),
    "windows at the end of the cache": (
        GPTNeoConfig(
            **FEW,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            bos_token_id=1,
            eos_token_id=2,
        ),
        "gpt_neo: it takes positions from the length of its cache",
    ),
    "biases by cache length": (
        BloomConfig(**FEW, n_layer=1, n_head=2),
        "bloom: it takes positions from the length of its cache",
    ),
    "chosen biases by cache length": (
        FalconConfig(**FEW, num_hidden_layers=1, num_attention_heads=2, alibi=True),
        "falcon: it takes positions from the length of its cache",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_models_without_a_cache_of_slots_are_refused_by_name(
    config: PreTrainedConfig, message: str
) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        CausalAdapter(model, vocab_size=32)


def test_the_context_is_the_models() -> None:
    assert tiny.adapter().max_positions == tiny.MAX_POSITIONS
    assert tiny.adapter("gpt2").max_positions == tiny.MAX_POSITIONS
    assert tiny.adapter(max_position_embeddings=40).max_positions == 40
