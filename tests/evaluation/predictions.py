"""`python -m tests.evaluation.predictions`: tokens a pass that are predicted, beside those decoded.

    python -m tests.evaluation.predictions TARGET DRAFT FILE.jsonl [TARGET DRAFT FILE.jsonl ...]

FILE.jsonl holds `text`; `draftkit/corpus` takes the text that comes with the package.

The prediction needs texts that the target sampled and both models' scores of them, no decoding.
It is held against the decoder on the same prompts with other noise, in both modes of ours, at
temperatures 0 and 1, at several gammas. What is tested is whether the difference of the two, paired
by prompt, is 0; with Holm's correction over all cells (Scandinavian Journal of Statistics 6, 1979).
"""

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from draftkit.config import DataConfig, DraftConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.data.chats import text_ids
from draftkit.data.corpora import read_documents
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.engines import ARGMAX, SAMPLED
from draftkit.evaluation.intervals import Estimate, estimate, gain_p_value
from draftkit.evaluation.ranking import holm
from draftkit.models.adapter import Adapter
from draftkit.models.loading import load_draft, load_target
from draftkit.theory.acceptance import Rate
from tests.records import records_of

MODES = {"sampled": SAMPLED, "argmax": ARGMAX}  # what the drafter proposes
TEMPERATURES, GAMMAS = (0.0, 1.0), (2, 5)
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, BATCH = 400, 32, 64, 200
CONTEXTS_SEED, DECODING_SEED = 1, 2


def two_sided(one: Rate, other: Rate) -> float:
    """How likely a paired difference as large would be if there were none."""
    return min(1.0, 2 * min(gain_p_value(one, other), gain_p_value(other, one)))


@dataclass(frozen=True)
class Cell:
    """One way of decoding. predicted, measured: tau. p_value: of the difference being 0."""

    pair: str
    tokens: str  # a key of MODES
    temperature: float
    gamma: int
    predicted: Rate
    measured: Rate

    @property
    def difference(self) -> Estimate:
        return estimate(self.measured, self.predicted, compare=operator.sub)

    @property
    def p_value(self) -> float:
        return two_sided(self.measured, self.predicted)


@dataclass(frozen=True)
class Models:
    """A pair, and prompts of it."""

    target: Adapter
    draft: Adapter
    eos_token_ids: Sequence[int]
    prompts: Sequence[Sequence[int]]

    def decoded(
        self, sampling: SamplingConfig, *, seed: int, gamma: int = 0, tokens: str = "sampled"
    ) -> list[Completion]:
        """What the decoder makes of the prompts, with proposals of the draft where `gamma` > 0."""
        requests = make_requests(
            self.prompts, max_new_tokens=NEW_TOKENS, sampling=sampling, gamma=gamma, seed=seed
        )
        proposer = DraftModelProposer(self.draft, tokens=tokens) if gamma else None
        return decode(
            self.target,
            [*requests],
            eos_token_ids=self.eos_token_ids,
            batch_size=BATCH,
            proposer=proposer,
        )

    def scored(self, sampling: SamplingConfig) -> PromptTotals:
        """Texts that the target samples alone, scored by both."""
        texts = self.decoded(sampling, seed=CONTEXTS_SEED)
        contexts = records_of(texts, sampling, seed=CONTEXTS_SEED)
        drafts: Mapping[str, Adapter] = {"draft": self.draft}
        return score_drafts(
            self.target,
            drafts,
            contexts,
            sampling=sampling,
            batch_size=BATCH,
            eos_token_ids=self.eos_token_ids,
        )["draft"]


def load(target: str, draft: str, data: DataConfig, prompts: int = PROMPTS) -> Models:
    """A pair of folders in float32, and the first tokens of documents of `data`, each once."""
    hardware = HardwareConfig(device="cpu", dtype="float32")
    loaded = load_target(TargetConfig(path=target), hardware)
    texts = [document.row["text"] for document in islice(read_documents(data), 4 * prompts)]
    rows = [tuple(ids[:PROMPT_TOKENS]) for ids in text_ids(loaded.tokenizer, texts, literal=True)]
    long = [row for row in dict.fromkeys(rows) if len(row) == PROMPT_TOKENS]
    adapter = load_draft(DraftConfig(path=draft), loaded)
    return Models(loaded.adapter, adapter, loaded.eos_token_ids, long[:prompts])


def cells(name: str, models: Models) -> Iterator[Cell]:
    """Every mode, temperature and gamma of a pair."""
    for temperature in TEMPERATURES:
        sampling = SamplingConfig(temperature=temperature)
        scored = models.scored(sampling)
        for tokens, mode in MODES.items():
            for gamma in GAMMAS:
                texts = models.decoded(sampling, seed=DECODING_SEED, gamma=gamma, tokens=tokens)
                measured = Rate.of((one.accepted + one.rounds, one.rounds) for one in texts)
                predicted = scored.tokens_a_pass(mode, gamma)
                yield Cell(name, tokens, temperature, gamma, predicted, measured)


def table(rows: Sequence[Cell]) -> str:
    """A line for each cell, the corrected p-value last."""
    lines = ["pair | proposals | T | gamma | predicted | measured | difference | p after Holm"]
    lines.append(" | ".join(["---"] * 8))
    for one, p in zip(rows, holm([one.p_value for one in rows], len(rows)), strict=True):
        low, high = one.difference.low, one.difference.high
        taus = f"{one.predicted.mean:.3f} | {one.measured.mean:.3f}"
        difference = f"{one.difference.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        way = f"{one.pair} | {one.tokens} | {one.temperature:g} | {one.gamma}"
        lines.append(f"{way} | {taus} | {difference} | {p:.2f}")
    return "\n".join(f"| {line} |" for line in lines)


def main(*words: str) -> None:
    """Print the table of all pairs that are given: target, draft and file of texts of each."""
    rows: list[Cell] = []
    for target, draft, file in zip(words[::3], words[1::3], words[2::3], strict=True):
        name = f"{draft.rstrip('/').rpartition('/')[2]} -> {target.rstrip('/').rpartition('/')[2]}"
        data = DataConfig(path=file)
        rows += cells(name, load(target, draft, data))
    sys.stdout.write(f"{table(rows)}\n{PROMPTS} prompts, {NEW_TOKENS} tokens each, float32\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
