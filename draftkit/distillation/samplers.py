"""Who continues prompts: one model, or the target and its draft together.

A `Sampler` turns prompts into records: what came out, from whom, how, and from which noise. Those
here run our decoder, or ask somebody else's. They know no steps and no folders.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from draftkit.config import Config, SamplingConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, Watch, decode, finish
from draftkit.decoding.proposers import drafting
from draftkit.decoding.state import Request
from draftkit.endpoint import COMPLETIONS, OTHERWISE, Endpoint, completion
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target

RETRIES = 7  # half a minute in all: an engine that is started anew is waited for
SCRATCH = 2  # cache slots behind the text, in plain decoding
ROLLOUTS, VALIDATION, TEST = "rollouts", "validation", "test"  # uses of the target's answers


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Continues prompts; each kind answers requests in its own way.

    An answer ends after `max_new_tokens`, or where prompt and answer hold `max_length` tokens.
    name: who samples, in a record. gamma: proposals a round.
    """

    sampling: SamplingConfig
    eos_token_ids: Sequence[int]
    max_new_tokens: int
    max_length: int
    batch_size: int
    seed: int
    name: str
    gamma: int = 0

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        """Return an answer to each prompt, cut after the first end of text.

        `rows` number the noise streams: the same row and prompt give the same answer in any batch.
        `version` says which weights are in force.
        """
        longest = min([self.max_length, *(model.max_positions for model in self.models)])
        requests = [
            Request(
                prompt_ids=prompt,
                max_new_tokens=min(self.max_new_tokens, longest - len(prompt)),
                sampling=self.sampling,
                gamma=self.gamma,
                proposer_id=DRAFT_ID if self.gamma > 0 else None,
                seed=self.seed,
                row=row,
            )
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        return [
            Record(
                prompt_ids=list(request.prompt_ids),
                sampling=dict(vars(self.sampling)),
                seed=self.seed,
                row=request.row,
                sampler=self.name,
                sampler_version=version,
                **answer,
            )
            for request, answer in zip(requests, self.answers(requests), strict=True)
        ]

    @property
    def models(self) -> Sequence[Adapter]:
        """Whose contexts hold prompt and answer."""
        return ()

    def answers(self, requests: Sequence[Request]) -> Iterable[Mapping[str, Any]]:
        """Of each answer what its record holds of it: `output_ids`, and what else is known."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DecoderSampler(Sampler):
    """Plain sampling of `model`; `name` is its part, `target` or `draft`.

    Compiled, one decoder serves all calls, and so does its code: whole batches in a cache of
    `max_length`. Records carry the `top_k` most likely ids of every token, where that is not 0.
    `watch` hears how far a call is.
    """

    model: Adapter
    compiled: bool = False
    top_k: int = 0
    watch: Watch | None = None
    _kept: list[Decoder] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def models(self) -> Sequence[Adapter]:
        return [self.model]

    def answers(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        if self.compiled:
            decoder = self._kept.pop() if self._kept else self._decoder()
            done = finish(decoder, requests, self.watch)
            self._kept.append(decoder)  # only now: after an error its rows are no one's
        else:
            done = decode(
                self.model,
                requests,
                eos_token_ids=self.eos_token_ids,
                batch_size=self.batch_size,
                top_k=self.top_k,
                watch=self.watch,
            )
        return (answer.recorded(likeliest=self.top_k > 0) for answer in done)

    def _decoder(self) -> Decoder:
        return Decoder(
            self.model,
            slots=self.batch_size,
            capacity=min(self.max_length, self.model.max_positions) + SCRATCH,
            eos_token_ids=self.eos_token_ids,
            compiled=True,
            batch_sizes=(),
            top_k=self.top_k,
        )


@dataclass(frozen=True, kw_only=True)
class BlockSampler(Sampler):
    """The `gamma` tokens that a parallel draft, or a head, proposes behind each prompt in a round.

    Nothing else is kept of it. verifier: the draft itself, or the target that a head reads.
    """

    draft: Adapter
    verifier: Adapter
    name: str = "draft"

    @property
    def models(self) -> Sequence[Adapter]:
        return [self.verifier, self.draft]

    def answers(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        rounds = decode(
            self.verifier,
            [replace(request, max_new_tokens=1) for request in requests],
            eos_token_ids=self.eos_token_ids,
            batch_size=self.batch_size,
            proposer=drafting(self.draft),
        )
        for request, done in zip(requests, rounds, strict=True):
            tokens = done.steps[0].proposed[: request.max_new_tokens]
            ends = (n for n, token in enumerate(tokens, 1) if token in self.eos_token_ids)
            yield {"output_ids": tokens[: next(ends, None)]}


@dataclass(frozen=True, kw_only=True)
class SpeculativeSampler(Sampler):
    """What a server does: `draft` proposes, `target` verifies.

    The text has the target's law; the records tell what was proposed and refused on the way, and
    their version is that of the draft.
    """

    target: Adapter
    draft: Adapter
    verification: str
    name: str = "speculative"

    @property
    def models(self) -> Sequence[Adapter]:
        return [self.target, self.draft]

    def answers(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        done = decode(
            self.target,
            requests,
            eos_token_ids=self.eos_token_ids,
            batch_size=self.batch_size,
            proposer=drafting(self.draft),
            verification=self.verification,
        )
        return (answer.recorded(proposals=True) for answer in done)


@dataclass(frozen=True, kw_only=True)
class OpenAISampler(Sampler):
    """Asks vLLM or SGLang at `url` for answers of `model`, `batch_size` at a time.

    Prompts travel as token ids, and answers come back as ids (`return_token_ids`): a text that is
    tokenised again may be other tokens than were sampled. What is served there is not checked.
    """

    url: str  # as http://127.0.0.1:8000/v1
    model: str
    name: str = "openai"

    def answers(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """As in `Sampler`; here the seed of a row is the engine's to interpret.

        Raises ValueError, one line, where the engine does not answer or not to what was asked.
        """
        with Endpoint("generate.url", self.url, retries=RETRIES) as engine:
            return engine.map(partial(self._answer, engine), requests, at_once=self.batch_size)

    async def _answer(self, engine: Endpoint, request: Request) -> dict[str, Any]:
        """The answer to `request`, to its first end or the limit."""
        prompt, limit, ends = list(request.prompt_ids), request.max_new_tokens, self.eos_token_ids
        body = completion(prompt, request.sampling, limit=limit, seed=request.seed, row=request.row)
        body |= {"model": self.model, "return_token_ids": True}
        response = await engine.send(COMPLETIONS, body)
        try:
            choice = response.json()["choices"][0]
            if choice.get("prompt_token_ids") not in (None, prompt):
                raise engine.failure("changes prompts: they do not come back as they were sent")
            if choice.get("token_ids") is None and choice["text"] is not None:
                raise engine.failure(
                    "returns text without token ids, of which nobody knows what was sampled: "
                    "use an engine that returns ids (vLLM, SGLang)"
                )
            output = list(choice["token_ids"])
            if choice.get("finish_reason") == "stop":
                # The end itself may be left out. Which of several it was vLLM and SGLang say; where
                # nobody does, none stands here rather than one that was not sampled.
                stop = choice.get("stop_reason", choice.get("matched_stop"))
                output += [stop] if stop in ends else list(ends) if len(ends) == 1 else []
        except OTHERWISE as error:
            raise engine.failure(f"answers with no completion ({error!r})") from error
        length = next((n for n, token in enumerate(output, start=1) if token in ends), limit)
        return {"output_ids": output[: min(length, limit)]}


def noise_seed(seed: int, use: str) -> int:
    """The seed of what is sampled for one `use` in a run of `seed`: 63 bits.

    Rows are counted from 0 in every use. Under one seed a prompt that training and test share, or
    two that are nearly alike, would get the same answer in both.
    """
    digest = hashlib.blake2b(f"{use} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def answered(
    sampler: Sampler, examples: Sequence[Example], *, rows: Sequence[int], version: str
) -> list[Record]:
    """What `sampler` says after the prompts of `examples`, with the documents that these are of."""
    prompts = [example.prompt_ids for example in examples]
    records = sampler.sample(prompts, rows=rows, version=version)
    return [
        replace(record, document=example.document, domain=example.domain)
        for record, example in zip(records, examples, strict=True)
    ]


def check_top_k(k: int, vocab_size: int) -> None:
    """Raise ValueError for `generate.top_k` that is no less than the vocabulary."""
    if k >= vocab_size:
        raise ValueError(
            f"generate.top_k: {k} of {vocab_size} ids are all there are: lower it, or use 0"
        )


def target_sampler(
    target: Target,
    sampling: SamplingConfig,
    room: Room,
    *,
    seed: int,
    batch_size: int,
    top_k: int = 0,
    watch: Watch | None = None,
) -> DecoderSampler:
    """The target, sampled as it is served. room: of an answer, and of prompt and answer."""
    check_top_k(top_k, target.adapter.vocab_size)
    return DecoderSampler(
        model=target.adapter,
        name="target",
        sampling=sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=room.new,
        max_length=room.total,
        batch_size=batch_size,
        seed=seed,
        top_k=top_k,
        watch=watch,
    )


def target_answers(
    target: Target,
    examples: Sequence[Example],
    config: Config,
    use: str,
    room: Room,
    *,
    version: str = "target",
    watch: Watch | None = None,
) -> list[Record]:
    """The target's answers to the prompts of `examples`, for one `use` of a run."""
    size = (config.generate if use == ROLLOUTS else config.evaluate).batch_size
    seed = noise_seed(config.seed, use)
    sampler = target_sampler(target, config.sampling, room, seed=seed, batch_size=size, watch=watch)
    return answered(sampler, examples, rows=range(len(examples)), version=version)
