"""Losslessness: greedy output with proposals equals greedy output without, token for token.

Passes over one token and over several use different kernels, so a near-tie may fall the other way.
A mismatch is tolerated, and counted, only at one: `greedy_identity`, for our decoder, for other
people's code on the same model, and for servers (`certificate`). Of models, every token from there
on must lie within the rounding of the best one, and that rounding is measured: each such answer is
read again in passes of the shapes that decoding has, and the largest change of a gap between two
logits is how far it may lie from zero, or a unit in their last place.

In bfloat16 ties are common. So their number is tested as well: plain answers in batches of another
size part from plain ones by nothing but rounding, and what parts much more often does not part by
rounding alone.

Shapes: N tokens of an answer, R rows of a pass, T tokens of the longest text, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.laws import logits_of, served_laws
from draftkit.evaluation.walltime import Setting
from draftkit.models.adapter import Adapter, parts_of
from draftkit.models.cache import SlotCache

MARGIN = 1e-5  # of a near-tie, where less rounding is measured
LEVEL = 1e-3  # of the test of how many answers part at near-ties


@dataclass(frozen=True)
class Losslessness:
    """How many outputs were compared, differed, and differed only by near-ties, in which dtype.

    p_value: how likely that many near-ties are if there are no more of them than between plain
    decoding and plain decoding in batches of another size; None where there are too few to tell.
    """

    compared: int
    mismatches: int
    near_ties: int
    dtype: torch.dtype = torch.float32
    p_value: float | None = None
    lossy: bool = False  # by design
    surprise: float | None = None  # of sampled answers, in standard deviations

    @property
    def passed(self) -> bool | None:
        """Whether all differences are near-ties, and not too many; None if nothing was compared."""
        if self.lossy:
            return False
        if not self.compared:
            return None
        return self.mismatches == self.near_ties and (self.p_value is None or self.p_value > LEVEL)

    @property
    def fault(self) -> str:
        """What is wrong where the check has not passed."""
        if self.lossy:
            fault = "decode.verification=typical is lossy by design"
            if self.surprise is None:
                return fault
            return (
                f"{fault}: the log-probability of {self.compared} sampled answers lies "
                f"{self.surprise:.1f} standard deviations off the target's (p = {self.p_value:.1g})"
            )
        if wrong := self.mismatches - self.near_ties:
            return f"{wrong} of {self.compared} greedy outputs differ from the target's"
        return (
            f"{self.near_ties} of {self.compared} greedy outputs part from the target's at "
            f"near-ties, more than by rounding (p = {self.p_value:.1g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """The `lossless` object of a summary."""
        name = str(self.dtype).removeprefix("torch.")
        method = f"greedy identity in {name}" if self.compared else "not checked"
        statistic = self.mismatches if self.compared else None
        if self.surprise is not None:
            method, statistic = "surprise of sampled answers", self.surprise
        return {
            "method": method,
            "statistic": statistic,
            "p_value": self.p_value,
            "passed": self.passed,
            "compared": self.compared,
            "near_ties": self.near_ties,
        }


NOT_CHECKED = Losslessness(0, 0, 0)
LOSSY = Losslessness(0, 0, 0, lossy=True)


Answer = Sequence[Any]  # its tokens
NearTies = Callable[[Mapping[int, int]], Sequence[bool]]  # asked of numbers of answers, with places


def greedy_identity(
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    *,
    again: Callable[[], Sequence[Answer]],
    near_ties: NearTies,
    dtype: torch.dtype = torch.float32,
) -> Losslessness:
    """Whether greedy answers with proposals are those without, but for near-ties, and not too many.

    again: answers without proposals once more, in batches of another size. near_ties: of answers
    that part there, whether they do by rounding alone. Where one begins the other, no tie explains
    it.
    """
    parted = partings(plain, drafted)
    ties = sum(near_ties({number: at for number, at in parted.items() if at is not None}))
    p_value = None
    if binomial_tail(ties, 0) <= LEVEL:  # as it takes time: for what could be too many
        p_value = binomial_tail(ties, len(partings(plain, again())))
    return Losslessness(len(plain), len(parted), ties, dtype, p_value)


def partings(plain: Sequence[Answer], others: Sequence[Answer]) -> dict[int, int | None]:
    """By the number of each answer that is not the same, where both part; None: one is longer."""
    pairs = enumerate(zip(plain, others, strict=True))
    return {number: parting(*both) for number, both in pairs if both[0] != both[1]}


def parting(first: Answer, second: Answer) -> int | None:
    """Where two answers part; None where one begins the other."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def binomial_tail(count: int, others: int) -> float:
    """P(X >= count) of X binomial over count + others draws with chance 1/2, exactly."""
    draws = count + others
    return sum(math.comb(draws, k) for k in range(count, draws + 1)) / 2**draws


# Of models


def greedy_answers(
    target: Adapter,
    prompts: Sequence[Sequence[int]],
    rows: int,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    proposer: Proposer | None = None,
    gamma: int = 0,
) -> list[Completion]:
    """What `target` answers, so many rows at a time, with proposals where something proposes."""
    requests = make_requests(
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=0.0),
        gamma=0 if proposer is None else gamma,
    )
    return decode(
        target, [*requests], eos_token_ids=eos_token_ids, batch_size=rows, proposer=proposer
    )


def decoded_identity(
    target: Adapter,
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    *,
    width: int,
    rows: int,
    again: Callable[[int], Sequence[Completion]],
) -> Losslessness:
    """`greedy_identity` of answers that were decoded so many rows at a time.

    Rounding is told by reading them in passes of the shapes that decoding has. width: tokens of a
    row that `target` verifies at once. again: plain answers, so many rows at a time.
    """
    other = 1 if rows > 1 else 2  # rows of another batch
    shapes = ((1, rows), (width, rows), (width, other))
    return greedy_identity(
        [one.output_ids for one in plain],
        [one.output_ids for one in drafted],
        again=lambda: [one.output_ids for one in again(other)],
        near_ties=partial(differ_by_rounding, target, plain, drafted, shapes),
        dtype=target.dtype,
    )


def check_proposers(
    target: Adapter,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    gamma: int,
    batch_size: int,
    eos_token_ids: Sequence[int],
) -> dict[str, Losslessness]:
    """Decode `prompts` greedily without and with each proposer and compare, as the models are."""
    rows = min(batch_size, len(prompts))
    answers = partial(
        greedy_answers,
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        gamma=gamma,
    )
    plain, checks = cache(answers), {}
    for name, proposer in proposers.items():
        width = 1 + (gamma if proposer.tree is None else proposer.tree.nodes)
        drafted = answers(rows, proposer=proposer)
        checks[name] = decoded_identity(
            target, plain(rows), drafted, width=width, rows=rows, again=plain
        )
    return checks


def sampled_surprise(
    target: Adapter,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Sequence[int]],
    setting: Setting,
) -> dict[str, Losslessness]:
    """Sampled answers to `prompts` with each proposer, held against the target's law (`surprise`).

    At temperature 0, where typical acceptance is greedy decoding, there is nothing to hold.
    """
    if setting.sampling.temperature == 0:
        return dict.fromkeys(proposers, LOSSY)

    checks = {}
    for name, proposer in proposers.items():
        requests = make_requests(
            prompts,
            max_new_tokens=setting.max_new_tokens,
            sampling=setting.sampling,
            gamma=setting.gamma,
            seed=setting.seed,
        )
        answers = decode(
            target,
            list(requests),
            eos_token_ids=setting.eos_token_ids,
            batch_size=setting.batch_size,
            proposer=proposer,
            verification=setting.verification,
            epsilon=setting.epsilon,
        )
        deviation = surprise(target, answers, setting.sampling, batch_size=setting.batch_size)
        checks[name] = Losslessness(
            len(answers),
            0,
            0,
            target.dtype,
            p_value=math.erfc(abs(deviation) / 2**0.5),
            lossy=setting.epsilon is not None,
            surprise=deviation,
        )
    return checks


@torch.inference_mode()
def surprise(
    target: Adapter, answers: Sequence[Completion], sampling: SamplingConfig, *, batch_size: int
) -> float:
    """How far the mean log-probability of `answers` lies above what it is of the target's samples.

    In standard deviations: of samples, each token's log p less its mean under the served law adds
    nothing on average, whatever came before, so that the sum is normal for many tokens.
    """
    total, variance = 0.0, 0.0
    for first in range(0, len(answers), batch_size):
        chunk: Any = answers[first : first + batch_size]
        logits, _ = logits_of(target, chunk)
        for one, (law,) in zip(chunk, served_laws(chunk, logits, sampling), strict=True):
            law = law.double()
            tokens = torch.tensor(one.output_ids, device=law.device)[:, None]
            log_p = law.clamp(min=torch.finfo(torch.float64).tiny).log()
            mean = (law * log_p).sum(-1)
            total += float((log_p.gather(1, tokens)[:, 0] - mean).sum())
            variance += float(((law * log_p.square()).sum(-1) - mean.square()).sum())
    return total / variance**0.5 if variance > 0 else 0.0


def differ_by_rounding(
    target: Adapter,
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    shapes: Sequence[tuple[int, int]],
    parted: Mapping[int, int],
) -> list[bool]:
    """Of greedy answers that part there, whether they do at a near-tie, and go on by best tokens.

    From where they part, each token of either must lie no further below the best one than rounding.
    shapes: tokens a row and rows of a pass. In each of them the answers are read, and the largest
    change of a gap between them is that of rounding; or a unit in the last place, since less of a
    change is seen as none or as a whole one.
    """
    read = [side[number] for number in parted for side in (plain, drafted)]
    readings = [_gaps(target, read, shape=shape) for shape in shapes]
    near_ties = [True] * len(parted)
    for number, at in enumerate(parted.values()):
        for index in (2 * number, 2 * number + 1):  # both answers
            gaps, units = torch.stack([one[index] for one in readings])[..., at:].unbind(1)
            least, most = gaps.amin(0), gaps.amax(0)
            margins = torch.maximum(most - least, units.amax(0)).clamp(min=MARGIN)
            near_ties[number] &= bool((least <= margins).all())  # which NaN is not
    return near_ties


@torch.inference_mode()
def _gaps(
    target: Adapter, answers: Sequence[Completion], *, shape: tuple[int, int]
) -> list[Tensor]:
    """How far each token of `answers` lies below the best one, and a unit of their logits [2, N].

    Read in passes of `shape` as decoding does: the prompt first, then so many tokens a row at once.
    Where there are fewer answers than rows, the last one fills them.
    """

    def padded(texts: Sequence[Sequence[int]]) -> Tensor:
        rows = [torch.tensor(text) for text in texts]
        return pad_sequence(rows, batch_first=True).to(target.device)

    width, rows = shape
    readings = []
    for first in range(0, len(answers), rows):
        chunk = [*answers[first : first + rows]]
        filled = [*chunk, *[chunk[-1]] * (rows - len(chunk))]
        whole = [[*one.prompt_ids, *one.output_ids] for one in filled]
        read, texts = zip(*(parts_of(row, target.start_id) for row in whole), strict=True)
        given = [len(text) - len(one.output_ids) for one, text in zip(filled, texts, strict=True)]
        begins = torch.tensor(given, device=target.device)
        longest, outputs = max(map(len, texts)), max(len(one.output_ids) for one in chunk)
        tokens = padded(texts)  # [R, T]
        cache = SlotCache(rows, longest, max(map(len, read))).select(None, visible=longest)
        if target.has_encoder:
            lengths = torch.tensor([len(text) for text in read], device=target.device)
            target.encode(padded(read), lengths=lengths, cache=cache)
        if (prompt := int(begins.max()) - 1) > 0:
            positions = torch.arange(prompt, device=target.device).expand(rows, -1)
            target.prefill(tokens[:, :prompt], positions=positions, cache=cache)
        parts = []
        for start in range(0, outputs, width):
            offsets = torch.arange(start - 1, start - 1 + width, device=target.device)
            positions = (begins[:, None] + offsets).clamp(max=longest - 1)  # beyond is garbage
            logits = target.step(tokens.gather(1, positions), positions=positions, cache=cache)
            following = tokens.gather(1, (positions + 1).clamp(max=longest - 1))
            best = logits.amax(-1).double()
            chosen = logits.gather(2, following[..., None])[..., 0].double()
            _, exponent = torch.frexp(torch.maximum(best.abs(), chosen.abs()))
            unit = torch.ldexp(torch.full_like(best, torch.finfo(logits.dtype).eps), exponent - 1)
            parts.append(torch.stack([best - chosen, unit], dim=1))  # [R, 2, N of the pass]
        made = torch.cat(parts, dim=-1).cpu()
        readings += [made[row, :, : len(one.output_ids)] for row, one in enumerate(chunk)]
    return readings
