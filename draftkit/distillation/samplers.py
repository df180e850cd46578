"""Who continues prompts: one model, or the target and its draft together.

A sampler turns prompts into records: what came out, from whom, how, and from which noise. One runs
our decoder, the other asks somebody else's. They know no steps and no folders.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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
from draftkit.distillation.remote import RemoteTarget
from draftkit.endpoint import COMPLETIONS, OTHERWISE, Endpoint, completion, origin_of
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target

SCRATCH = 2  # cache slots behind the text, in plain decoding
ROLLOUTS, VALIDATION, TEST = "rollouts", "validation", "test"  # uses of the target's answers


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How prompts are continued, by whomever.

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

    def requests(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], *models: Adapter
    ) -> list[Request]:
        """One for each prompt, of a length that the contexts of `models` hold."""
        longest = min([self.max_length, *(model.max_positions for model in models)])
        return [
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

    def records(
        self, requests: Sequence[Request], answers: Iterable[Mapping[str, Any]], version: str
    ) -> list[Record]:
        """The requests with their answers: `output_ids`, and what else is known of each token."""
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
            for request, answer in zip(requests, answers, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class DecoderSampler(Limits):
    """Our decoder. `model` samples alone, or verifies what `draft` proposes, as a server does.

    name: `target`, `draft` or `speculative`. A text that is verified has the target's law; its
    record tells what was proposed and refused on the way. is_block: an answer is what `draft`
    proposes in the first round, and nothing else is kept of it. Compiled, one decoder serves all
    calls of a model that samples alone, and so does its code: whole batches in a cache of
    `max_length`. Records carry the `top_k` most likely ids of every token, where that is not 0.
    `watch` hears how far a call is.
    """

    model: Adapter
    draft: Adapter | None = None
    verification: str = "speculative"
    is_block: bool = False
    compiled: bool = False
    top_k: int = 0
    watch: Watch | None = None
    _kept: list[Decoder] = field(default_factory=list, init=False, repr=False, compare=False)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        """Return an answer to each prompt, cut after the first end of text.

        `rows` number the noise streams: the same row and prompt give the same answer in any batch.
        `version` says which weights are in force.
        """
        model, draft, ends = self.model, self.draft, self.eos_token_ids
        requests = self.requests(prompts, rows, model, *(() if draft is None else (draft,)))
        if self.compiled:
            decoder = self._kept.pop() if self._kept else None
            decoder = decoder or Decoder(
                model,
                slots=self.batch_size,
                capacity=min(self.max_length, model.max_positions) + SCRATCH,
                eos_token_ids=ends,
                compiled=True,
                batch_sizes=(),
                top_k=self.top_k,
            )
            done = finish(decoder, requests, self.watch)
            self._kept.append(decoder)  # only now: after an error its rows are no one's
        else:
            done = decode(
                model,
                [replace(one, max_new_tokens=1) for one in requests] if self.is_block else requests,
                eos_token_ids=ends,
                batch_size=self.batch_size,
                proposer=None if draft is None else drafting(draft),
                verification=self.verification,
                top_k=self.top_k,
                watch=self.watch,
            )
        if not self.is_block:
            shown = {"likeliest": self.top_k > 0, "proposals": draft is not None}
            return self.records(requests, (one.recorded(**shown) for one in done), version)
        blocks = []
        for request, one in zip(requests, done, strict=True):
            tokens = one.steps[0].proposed[: request.max_new_tokens]
            end = next((n for n, token in enumerate(tokens, 1) if token in ends), None)
            blocks.append({"output_ids": tokens[:end]})
        return self.records(requests, blocks, version)


@dataclass(frozen=True, kw_only=True)
class RemoteSampler(Limits):
    """Asks the engines of a remote `target` for its answers, `batch_size` at a time.

    Prompts travel as token ids, and answers come back as ids (`return_token_ids`): a text that is
    tokenised again may be other tokens than were sampled. What is served there is not checked.
    """

    target: RemoteTarget
    name: str = "openai"

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        """As that of `DecoderSampler`; here the seed of a row is the engine's to interpret.

        Raises ValueError, one line, where the engine does not answer or not to what was asked.
        """
        requests = self.requests(prompts, rows)
        with self.target.opened() as engine:
            answers = engine.map(partial(self._answer, engine), requests, at_once=self.batch_size)
        return self.records(requests, answers, version)

    async def _answer(self, engine: Endpoint, request: Request) -> dict[str, Any]:
        """The answer to `request`, to its first end or the limit."""
        prompt, limit, ends = list(request.prompt_ids), request.max_new_tokens, self.eos_token_ids
        body = completion(prompt, request.sampling, limit=limit, seed=request.seed, row=request.row)
        body |= {"model": self.target.model, "return_token_ids": True}
        response = await engine.send(COMPLETIONS, body, at=request.row)
        origin = origin_of(response)
        try:
            choice = response.json()["choices"][0]
            if choice.get("prompt_token_ids") not in (None, prompt):
                raise engine.failure(
                    "changes prompts: they do not come back as they were sent", origin
                )
            if choice.get("token_ids") is None and choice["text"] is not None:
                raise engine.failure(
                    "returns text without token ids, of which nobody knows what was sampled: "
                    "use vLLM",
                    origin,
                )
            output = list(choice["token_ids"])
            if choice.get("finish_reason") == "stop":
                # The end itself may be left out. Which of several it was vLLM and SGLang say; where
                # nobody does, none stands here rather than one that was not sampled.
                stop = choice.get("stop_reason", choice.get("matched_stop"))
                output += [stop] if stop in ends else list(ends) if len(ends) == 1 else []
        except OTHERWISE as error:
            raise engine.failure(f"answers with no completion ({error!r})", origin) from error
        length = next((n for n, token in enumerate(output, start=1) if token in ends), limit)
        return {"output_ids": output[: min(length, limit)]}


Sampler = DecoderSampler | RemoteSampler


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
    target: Target | RemoteTarget,
    sampling: SamplingConfig,
    room: Room,
    *,
    seed: int,
    batch_size: int,
    compiled: bool = False,
    top_k: int = 0,
    watch: Watch | None = None,
) -> Sampler:
    """The target, sampled as it is served. room: of an answer, and of prompt and answer.

    `compiled`, `top_k` and `watch` are of a target in memory alone, the first on CPUs alone.
    """
    limits: dict[str, Any] = {
        "sampling": sampling,
        "eos_token_ids": target.eos_token_ids,
        "max_new_tokens": room.new,
        "max_length": room.total,
        "batch_size": batch_size,
        "seed": seed,
    }
    if isinstance(target, RemoteTarget):
        limits["max_length"] = min(room.total, target.longest)
        return RemoteSampler(target=target, **limits)
    check_top_k(top_k, target.adapter.vocab_size)
    # On CUDA eager rounds wait for nothing; what compiling them gives there is not measured.
    compiled = compiled and target.device.type == "cpu"
    limits |= {"compiled": compiled, "top_k": top_k, "watch": watch}
    return DecoderSampler(model=target.adapter, name="target", **limits)


def target_answers(
    target: Target | RemoteTarget,
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
