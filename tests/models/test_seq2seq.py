"""Encoder-decoder models, slot by slot, against the model itself."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    PreTrainedConfig,
    PreTrainedModel,
    UMT5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from draftkit.models.cache import SlotCache
from draftkit.models.seq2seq import Seq2SeqAdapter, inside
from tests import tiny

ATOL = 1e-10
LONGEST = 12  # encoder tokens that a row of the tests holds
kinds = pytest.mark.parametrize("kind", tiny.SEQ2SEQ)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the dtype of the model: the library's, in float32, would hide what we look for."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)

    monkeypatch.setattr(T5LayerNorm, "forward", forward)
    monkeypatch.setattr(MT5LayerNorm, "forward", forward)


def adapter_of(kind: str = "t5", **options: Any) -> Seq2SeqAdapter:
    return Seq2SeqAdapter(tiny.seq2seq_model(kind, **options), vocab_size=tiny.VOCAB_SIZE)


def padded(texts: Sequence[Sequence[int]], width: int = 0) -> tuple[Tensor, Tensor]:
    """Texts [B, E] with padding on the right, and their lengths [B]."""
    lengths = torch.tensor([len(text) for text in texts])
    tokens = torch.full((len(texts), max(width, int(lengths.max()))), 200)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return tokens, lengths


def fresh(model: PreTrainedModel, encoder: Sequence[int], tokens: Tensor) -> Tensor:
    """The model's own logits [T, V] of `tokens` [T], with nothing of ours."""
    encoder_ids = torch.tensor([list(encoder)])
    return model(input_ids=encoder_ids, decoder_input_ids=tokens[None], use_cache=False).logits[0]


class Rows:
    """Rows of a cache with the texts that they stand for; every step is compared."""

    def __init__(self, adapter: Any, expected: Callable[[int, Tensor], Tensor], cache: SlotCache):
        self.adapter, self.expected, self.cache = adapter, expected, cache
        self.encoders: dict[int, list[int]] = {}
        self.start: dict[int, int] = {}
        # Beyond 16 tokens all distances share a bucket; texts pass that.
        self.tokens = torch.tensor(tiny.prompts([40] * cache.rows, seed=7))

    def join(self, rows: list[int], encoders: list[list[int]], first: list[int]) -> None:
        """Encode the texts of `rows`, and feed the `first` tokens of each decoder text."""
        tokens, lengths = padded(encoders)
        self.cache.select(torch.tensor(rows), visible=40)
        self.adapter.encode(tokens, lengths=lengths, cache=self.cache)
        for row, encoder, count in zip(rows, encoders, first, strict=True):
            self.encoders[row], self.start[row] = encoder, count
            cache = self.cache.select(torch.tensor([row]), visible=count)
            positions = torch.arange(count)[None]
            self.adapter.prefill(self.tokens[row, None, :count], positions=positions, cache=cache)

    def step(self, rows: list[int] | None, width: int) -> None:
        """A rejected proposal, then the true tokens over its slots, of `rows` (None: all)."""
        named = list(range(self.cache.rows)) if rows is None else rows
        start = torch.tensor([self.start[row] for row in named])
        index = None if rows is None else torch.tensor(rows)
        tokens = self.tokens if rows is None else self.tokens[rows]
        wide = start[:, None] + torch.arange(width + 2)
        cache = self.cache.select(index, visible=int(start.max()) + width + 2)
        self.adapter.step((tokens.gather(1, wide) + 7) % 256, positions=wide, cache=cache)
        positions = wide[:, :width]
        logits = self.adapter.step(tokens.gather(1, positions), positions=positions, cache=cache)
        for row, first, found in zip(named, start.tolist(), logits, strict=True):
            expected = self.expected(row, self.tokens[row, : first + width])[first:]
            torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
            self.start[row] = first + width


def play(rows: Rows) -> None:
    """Ragged steps with rollback, and rows that leave for others with longer or shorter texts."""
    texts = tiny.prompts([5, LONGEST, 3, 1, 9, 2], seed=1)
    rows.join([4, 0, 2], texts[:3], first=[3, 12, 9])
    for width in (4, 1, 2):
        rows.step([4, 0, 2], width)
    rows.join([1, 3], texts[3:5], first=[1, 2])
    rows.step(None, 3)
    rows.join([0], texts[5:], first=[1])  # 2 tokens over the 12 of the row's last text
    for width in (5, 1, 3):
        rows.step(None, width)
    rows.step([0], 4)


@kinds
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_ragged_steps_with_rollback_equal_the_model_without_a_cache(
    kind: str, attention: str
) -> None:
    adapter = adapter_of(kind, dtype=torch.float64)
    adapter.model.set_attn_implementation(attention)

    def expected(row: int, tokens: Tensor) -> Tensor:
        return fresh(adapter.model, rows.encoders[row], tokens)

    rows = Rows(adapter, expected, SlotCache(5, 48, encoder_capacity=LONGEST))
    play(rows)


@torch.no_grad()
def test_rows_without_a_text_stay_finite_in_half_precision() -> None:
    adapter = adapter_of(dtype=torch.float16)
    cache = SlotCache(3, 8, encoder_capacity=4)
    tokens, lengths = padded(tiny.prompts([4]))
    adapter.encode(tokens, lengths=lengths, cache=cache.select(torch.tensor([1]), visible=8))
    logits = adapter.step(
        torch.tensor([[1], [2], [3]]),
        positions=torch.zeros(3, 1, dtype=torch.long),
        cache=cache.select(None, visible=8),
    )
    assert logits.isfinite().all()


# Compiled code


@torch.no_grad()
def test_a_step_is_one_graph() -> None:
    adapter = adapter_of()
    compiled = torch.compile(adapter.step, fullgraph=True, dynamic=False, backend="eager")
    rows = torch.tensor([2, 0])
    results = []
    for step in (adapter.step, compiled):
        cache = SlotCache(3, 40, encoder_capacity=8).select(rows, visible=32)
        tokens, lengths = padded(tiny.prompts([7, 3]))
        adapter.encode(tokens, lengths=lengths, cache=cache)
        fed = torch.tensor(tiny.prompts([4, 4], seed=5))
        for first in (torch.tensor([[0], [0]]), torch.tensor([[2], [4]])):
            results.append(step(fed, positions=first + torch.arange(4), cache=cache))
        assert cache.visible == 32
    torch.testing.assert_close(results[:2], results[2:])


# Scores


@kinds
@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_scores_of_kept_positions_equal_the_model_whatever_lies_to_the_right(kind: str) -> None:
    adapter = adapter_of(kind, dtype=torch.float64)
    texts = tiny.prompts([24, 5, 13])
    encoders = tiny.prompts([2, 9, 6], seed=4)
    texts = [[tiny.START, *text] for text in texts]
    tokens, counts = padded([one + text for one, text in zip(encoders, texts, strict=True)])
    order = torch.arange(tokens.shape[1])
    keep = inside(counts, len(order)) & (order % 3 != 1)
    keep &= order >= torch.tensor([[len(one)] for one in encoders])  # no text of the encoder
    scores = adapter.score(tokens, keep)
    expected = [
        fresh(adapter.model, one, torch.tensor(text))[keep[row, len(one) : len(one) + len(text)]]
        for row, (one, text) in enumerate(zip(encoders, texts, strict=True))
    ]
    torch.testing.assert_close(scores, torch.cat(expected), atol=ATOL, rtol=0)


@torch.no_grad()
def test_logits_are_cut_to_the_real_vocabulary() -> None:
    adapter = adapter_of(vocab_size=300)
    tokens, lengths = padded(tiny.prompts([4, 2]))
    cache = SlotCache(2, 8, encoder_capacity=4)
    adapter.encode(tokens, lengths=lengths, cache=cache)
    positions = torch.arange(4).expand(2, 4)
    assert adapter.step(tokens, positions=positions, cache=cache).shape == (2, 4, 258)
    rows, counts = padded([[3, tiny.START, 4], [3, tiny.START]])
    assert adapter.score(rows, inside(counts, 3) & (rows != 3)).shape == (3, 258)


# Weights


def test_models_of_one_signature_differ_in_values_only() -> None:
    signatures = [
        adapter_of().signature,
        adapter_of("t5 1.1").signature,
        adapter_of(dtype=torch.float64).signature,
        tiny.adapter().signature,
    ]
    untied = adapter_of()
    untied.model.lm_head.weight = torch.nn.Parameter(untied.model.lm_head.weight.detach().clone())
    assert len({*signatures, untied.signature}) == 5
    assert adapter_of(seed=5).signature == signatures[0]


# Refusals

_BART: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
_WHISPER: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
REFUSED: dict[str, tuple[Any, PreTrainedConfig]] = {
    "bart": (AutoModelForSeq2SeqLM.from_config, BartConfig(**_BART, forced_eos_token_id=None)),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig(**_BART, **_WHISPER, decoder_start_token_id=0, suppress_tokens=None),
    ),
    "umt5": (
        AutoModelForSeq2SeqLM.from_config,
        UMT5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_encoder_decoder_models_are_refused_by_name(name: str) -> None:
    made, config = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{name}: .* use a T5-type one \\(t5, mt5\\)$"):
        Seq2SeqAdapter(made(config), vocab_size=32)
