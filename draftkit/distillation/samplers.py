"""Who continues prompts: one model, or the target and its draft together.

A `Sampler` turns prompts into records: what came out, from whom, how, and from which noise. Those
here run our decoder; `engines` asks somebody else's. They know no data, no steps and no folders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import (
    LIKELIEST,
    Completion,
    TraceRound,
    Watch,
    decode,
    finish,
    make_requests,
)
from draftkit.decoding.proposers import drafting
from draftkit.decoding.state import Request
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.theory.noise import DRAFT, sample, uniform
from draftkit.theory.warping import SamplingParams, seen_tokens, warp

SCRATCH = 2  # cache slots behind the text, in plain decoding


class Sampler(Protocol):
    """Continues prompts."""

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        """Return an answer to each prompt, cut after the first end of text.

        `rows` number the noise streams: the same row and prompt give the same answer in any batch.
        `version` says which weights are in force.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are sampled, and how long they get.

    An answer ends after `max_new_tokens`, or where prompt and answer hold `max_length` tokens.
    """

    sampling: SamplingConfig
    eos_token_ids: Sequence[int]
    max_new_tokens: int
    max_length: int
    batch_size: int
    seed: int

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        *,
        models: Sequence[Adapter],
        gamma: int = 0,
    ) -> list[Request]:
        """One request a prompt, within the context of all `models`."""
        made = make_requests(
            prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            gamma=gamma,
            seed=self.seed,
            max_length=min(self.max_length, *(model.max_positions for model in models)),
        )
        return [replace(request, row=row) for request, row in zip(made, rows, strict=True)]

    def record(
        self, prompt: Sequence[int], output: Sequence[int], *, row: int, **others: Any
    ) -> Record:
        """An answer with all that made it; `others` are further fields of the record."""
        return Record(
            prompt_ids=list(prompt),
            output_ids=list(output),
            sampling=dict(vars(self.sampling)),
            seed=self.seed,
            row=row,
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class DecoderSampler:
    """Plain sampling of `model`; `name` is its part, `target` or `draft`.

    Compiled, one decoder serves all calls, and so does its code: whole batches in a cache of
    `max_length`. Records carry the `top_k` most likely ids of every token, where that is not 0.
    `watch` hears how far a call is.
    """

    model: Adapter
    name: str
    settings: AnswerSettings
    compiled: bool = False
    top_k: int = 0
    watch: Watch | None = None
    _kept: dict[bool, Decoder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        settings = self.settings
        requests = settings.requests(prompts, rows, models=[self.model])
        if self.compiled:
            answers = self._answer(requests)
        else:
            answers = decode(
                self.model,
                requests,
                eos_token_ids=settings.eos_token_ids,
                batch_size=settings.batch_size,
                top_k=self.top_k,
                watch=self.watch,
            )
        return [
            settings.record(
                prompt,
                answer.output_ids,
                row=row,
                sampler=self.name,
                sampler_version=version,
                **{name: getattr(answer, name) for name in LIKELIEST if self.top_k},
            )
            for prompt, answer, row in zip(prompts, answers, rows, strict=True)
        ]

    def _answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode `requests` on the decoder that is kept, which is made by the first of them."""
        settings = self.settings
        constant = self.model.is_constant  # or open to training: other code
        decoder = self._kept.pop(constant, None)
        self._kept.clear()
        if decoder is None:
            decoder = Decoder(
                self.model,
                slots=settings.batch_size,
                capacity=min(settings.max_length, self.model.max_positions) + SCRATCH,
                eos_token_ids=settings.eos_token_ids,
                compiled=True,
                batch_sizes=(),
                top_k=self.top_k,
            )
        answers = finish(decoder, requests, self.watch)
        self._kept[constant] = decoder  # only now: after an error its rows are no one's
        return answers


@dataclass(frozen=True, kw_only=True)
class BlockSampler:
    """What a parallel draft proposes behind each prompt in one pass, up to its trained number.

    Token i is drawn from its own law, which knows the prompt alone.
    """

    draft: CausalAdapter
    settings: AnswerSettings

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        settings, size = self.settings, self.settings.batch_size
        records = []
        for first in range(0, len(prompts), size):
            some, numbers = prompts[first : first + size], rows[first : first + size]
            for prompt, row, tokens in zip(some, numbers, self._draw(some, numbers), strict=True):
                records.append(
                    settings.record(
                        prompt, tokens, row=row, sampler="draft", sampler_version=version
                    )
                )
        return records

    def _draw(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[list[int]]:
        """The tokens of each prompt, as many as settings and contexts let it have."""
        parallel, draft, settings = self.draft.parallel, self.draft, self.settings
        assert parallel is not None
        requests = settings.requests(prompts, rows, models=[draft])
        masks = [parallel.token] * (parallel.blocks - 1)
        texts = [[*prompt, *masks] for prompt in prompts]
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        order = torch.arange(width)
        keep = (order >= lengths[:, None] - 1) & (order < lengths[:, None] - 1 + parallel.blocks)
        logits = draft.score(tokens.to(draft.device), keep.to(draft.device))
        logits = logits.unflatten(0, (len(prompts), parallel.blocks))  # [B, K, V]
        params = SamplingParams.uniform(
            len(prompts), **vars(settings.sampling), device=draft.device
        )
        seen = None
        if params.uses_penalty:
            of_prompts = seen_tokens(
                tokens.to(draft.device), lengths.to(draft.device), logits.shape[-1]
            )
            seen = of_prompts[:, None]
        noise = uniform(
            seed=torch.full_like(lengths, settings.seed),
            row=torch.tensor(rows),
            length=lengths,
            count=parallel.blocks,
            purpose=DRAFT,
        )
        drawn = sample(probs=warp(logits, params, seen), uniform=noise.to(draft.device)).tolist()
        ends = {*settings.eos_token_ids}
        counts = [
            next((i for i, token in enumerate(row, 1) if token in ends), len(row)) for row in drawn
        ]
        return [
            row[: min(count, request.max_new_tokens)]
            for row, count, request in zip(drawn, counts, requests, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class SpeculativeSampler:
    """What a server does: `draft` proposes, `target` verifies.

    The text has the target's law; the records tell what was proposed and refused on the way, and
    their version is that of the draft.
    """

    target: Adapter
    draft: Adapter
    gamma: int
    verification: str
    settings: AnswerSettings

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        settings = self.settings
        models = [self.target, self.draft]
        answers = decode(
            self.target,
            settings.requests(prompts, rows, models=models, gamma=self.gamma),
            eos_token_ids=settings.eos_token_ids,
            batch_size=settings.batch_size,
            proposer=drafting(self.draft, version=version),
            verification=self.verification,
        )
        return [
            settings.record(
                prompt,
                answer.output_ids,
                row=row,
                sampler="speculative",
                sampler_version=version,
                proposals=proposals,
                rejected=rejected,
            )
            for prompt, answer, row in zip(prompts, answers, rows, strict=True)
            for proposals, rejected in [verdicts(answer.steps)]
        ]


def verdicts(rounds: Sequence[TraceRound]) -> tuple[list[int], list[bool]]:
    """For each token of an answer, what was proposed in its place (-1: nothing), and if refused.

    In the place of a bonus token nothing was proposed. Proposals behind a refused one
    were never tested, and belong to another text.
    """
    proposals: list[int] = []
    rejected: list[bool] = []
    for step in rounds:
        for index in range(step.committed):
            proposals.append(step.proposed[index] if index < len(step.proposed) else -1)
            rejected.append(step.accepted <= index < len(step.proposed))
    return proposals, rejected
