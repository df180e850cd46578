"""A target behind HTTP: vLLM writes its texts and scores given ones; its weights are not here.

An engine names the likeliest ids of every token of a text at temperature 1 (`prompt_logprobs`); the
mass of all others is what they leave. At another temperature these ids are known among themselves,
and the mass of the others lies between bounds (`theory.truncation.tail_bounds`).

Shapes: M generated tokens of all texts together, k ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from draftkit.config import HardwareConfig, TargetConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import TokenSequence, continued
from draftkit.endpoint import COMPLETIONS, OTHERWISE, Endpoint, origin_of
from draftkit.models.files import ModelFolder
from draftkit.models.loading import Outline, load_outline
from draftkit.models.shapes import context_of
from draftkit.models.vocabulary import count_ids
from draftkit.theory.truncation import tail_bounds

KEY = "target.urls"
RETRIES = 13  # rounds through all addresses, over a minute: an engine that is started anew comes
PROBE = "Three words: one, two, three. The capital of France is"  # whose scores tell models apart
PROBE_FILE = "probe.json"
APART = 0.05  # of the scores of one text, on average over its tokens: more is another model

Scores = tuple[Tensor, Tensor]  # ids and log-probabilities [M, k], descending


@dataclass(frozen=True, kw_only=True)
class RemoteTarget(Outline):
    """The target as engines at `urls` serve it, under the name `model`.

    longest: tokens of a text that it scores, since it must have room for one more. top_k: ids that
    are asked for. at_once: requests under way. probe: the scores of `PROBE`.
    """

    urls: Sequence[str]
    model: str
    vocab_size: int
    longest: int
    top_k: int = 0
    at_once: int = 1
    probe: Scores | None = None

    def opened(self) -> Endpoint:
        """The client of all addresses: a context."""
        return Endpoint(KEY, *self.urls, retries=RETRIES)

    def scores(self, texts: Sequence[TokenSequence]) -> Scores:
        """The likeliest ids of every generated token of `texts`, in their order.

        Raises ValueError, one line, where an engine does not tell them.
        """
        self.check_room(len(one.token_ids) for one in texts)
        with self.opened() as server:
            score = partial(self._scored, server)
            rows = server.map(score, enumerate(texts), at_once=self.at_once)
        return self._tensors([row for text in rows for row in text])

    async def _scored(
        self, server: Endpoint, numbered: tuple[int, TokenSequence]
    ) -> list[list[tuple[float, int]]]:
        """The rows of one text: log-probabilities, descending, with their ids."""
        number, text = numbered
        body = {"model": self.model, "prompt": [*text.token_ids], "max_tokens": 1}
        body |= {"prompt_logprobs": self.top_k, "temperature": 0.0}
        response = await server.send(COMPLETIONS, body, at=number)
        try:
            rows = response.json()["choices"][0]["prompt_logprobs"]
            return [
                sorted(((one["logprob"], int(token)) for token, one in row.items()), reverse=True)
                for row, generated in zip(rows, text.generated, strict=True)
                if generated and row is not None
            ]
        except (*OTHERWISE, ValueError) as error:
            raise server.failure(
                "scores no given text (prompt_logprobs), as vLLM does: a teacher must",
                origin_of(response),
            ) from error

    def _tensors(self, rows: Sequence[Sequence[tuple[float, int]]]) -> Scores:
        """Of each row the first k ids that the tokenizer has: engines score rows of padding too.

        Where these are fewer than k, others with no probability stand behind them.
        """
        all_ids, all_values = [], []
        for row in rows:
            known = [(value, token) for value, token in row if token < self.vocab_size]
            known = known[: self.top_k]
            ids = [token for _, token in known]
            spare = (token for token in count() if token not in ids)
            missing = self.top_k - len(ids)
            all_ids.append([*ids, *islice(spare, missing)])
            all_values.append([*(value for value, _ in known), *[-torch.inf] * missing])
        return torch.tensor(all_ids), torch.tensor(all_values, dtype=torch.float64)

    def scored(self, records: Sequence[Record], *, loss_temperature: float = 1.0) -> list[Record]:
        """`records` with the likeliest ids of every output token, as `distillation.scores` stores
        them; masses of other ids are in the middle of their bounds."""
        texts = [continued(one.prompt_ids, one.output_ids) for one in records]
        lengths = [len(one.output_ids) for one in records]
        ids, log_probs = (values.split(lengths) for values in self.scores(texts))
        scored = []
        for record, own_ids, own in zip(records, ids, log_probs, strict=True):
            served = record.sampling["temperature"] or 1.0
            known: dict[str, Any] = {"topk_ids": own_ids.tolist(), "topk_log_probs": own.tolist()}
            known["tail_mass"] = self.tail(own, served).tolist()
            known["loss_tail_mass"] = self.tail(own, loss_temperature).tolist()
            scored.append(replace(record, **known))
        return scored

    def tail(self, log_probs: Tensor, temperature: float) -> Tensor:
        """The mass [M] of all other ids at `temperature`: the middle of what it can be."""
        least, most = tail_bounds(log_probs, temperature, self.vocab_size)
        return (least + most) / 2

    def tail_line(self, records: Sequence[Record], temperature: float) -> str:
        """How well the mass of other ids is known at `temperature`, by scored `records`."""
        rows = [row for one in records for row in one.topk_log_probs or ()]
        log_probs = torch.tensor(rows, dtype=torch.float64)
        least, most = tail_bounds(log_probs, temperature, self.vocab_size)
        known = f"lies between {least.mean():.2g} and {most.mean():.2g}"
        known = known if temperature != 1 else f"is {most.mean():.2g}, exactly"
        return (
            f"an engine scores: its {self.top_k} likeliest ids, and all others, whose mass {known}"
            f" on average at temperature {temperature:g}"
        )

    def check_room(self, lengths: Iterable[int]) -> None:
        """Raise ValueError for a text of more tokens than the engines score; lengths: of texts."""
        if (tokens := max(lengths, default=0)) > self.longest:
            raise ValueError(
                f"{KEY}: the engine scores texts of at most {self.longest:,} tokens, and one has "
                f"{tokens:,}: start it with --max-model-len {tokens + 1}, or lower "
                "data.max_prompt_tokens, data.max_completion_tokens or data.max_length"
            )

    def check_law(self, probe: Sequence[Sequence[Sequence[float]]], stage: str) -> None:
        """Raise ValueError unless the engines score as the one that left `probe` in `stage`."""
        assert self.probe is not None
        ids, log_probs = probe
        before = torch.tensor(ids), torch.tensor(log_probs, dtype=torch.float64)
        if not is_same_law(self.probe, before):
            raise ValueError(
                f"{KEY}: {self.urls[0]} scores a text otherwise than the engine that wrote the "
                f"answers of this experiment: serve that model, or redo them by `python -m "
                f"pipelines.{stage} ... overwrite=true`"
            )


def is_same_law(one: Scores, other: Scores) -> bool:
    """Whether two scores of one text are of one model, but for rounding: sum |p - q| / 2 over the
    ids that either names, of as many as both do."""
    apart, k = [], min(one[1].shape[-1], other[1].shape[-1])
    one, other = ((ids[:, :k], values[:, :k]) for ids, values in (one, other))
    for ids, values, other_ids, other_values in zip(*one, *other, strict=True):
        p, q = (
            dict(zip(own.tolist(), probs.exp().tolist(), strict=True))
            for own, probs in ((ids, values), (other_ids, other_values))
        )
        apart.append(sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in p.keys() | q.keys()) / 2)
    return sum(apart) / len(apart) <= APART


def remote_target(
    model: TargetConfig, hardware: HardwareConfig, *, top_k: int = 0, at_once: int = 1
) -> RemoteTarget:
    """The target that engines at `target.urls` serve; its tokenizer is that of `target.path`.

    top_k: ids that they shall name of given texts; 0: they only write. Raises ValueError, one line,
    for an engine that serves another model, that does not score, or scores one text in two ways.
    """
    outline = load_outline(model, hardware)
    ids, names = outline.tokenizer.encode(PROBE), list[str]()
    longest = context_of(ModelFolder(model).config)
    for url in model.urls:
        with Endpoint(KEY, url, retries=RETRIES) as server:
            served = server.models()[0]
            names.append(served["id"])
            longest = min(longest, served.get("max_model_len") or longest)
            check_ids(server, names[-1], ids, model)
    if len({*names}) > 1:
        known = " and ".join(dict.fromkeys(names))
        raise ValueError(f"{KEY}: serve {known}: all must serve one model, by one name")
    size = count_ids(outline.tokenizer)
    target = RemoteTarget(
        **vars(outline),
        urls=model.urls,
        model=names[0],
        vocab_size=size,
        longest=longest - 1,
        top_k=min(top_k, size - 1),
        at_once=at_once,
    )
    return replace(target, probe=probed(target, ids)) if top_k else target


def check_ids(server: Endpoint, name: str, ids: Sequence[int], model: TargetConfig) -> None:
    """Raise ValueError unless the engine reads `PROBE` as `ids`, those of `target.path`."""
    read, written = server.ids_of(name, PROBE)
    if not written:
        raise server.failure(
            "tells no ids of its texts (return_token_ids), of which nobody knows what was sampled: "
            "use vLLM"
        )
    if read and read != ids:
        raise server.failure(
            f"reads {PROBE!r} by other ids than the tokenizer of {model.named}: name the model "
            "that it serves by target.path"
        )


def probed(target: RemoteTarget, ids: Sequence[int]) -> Scores:
    """The scores of `PROBE`, of every address twice.

    Raises ValueError where they are not alike: of different models, or of stale rows, which engines
    have returned from a cache of prefixes (vLLM issue 42019).
    """
    text = TokenSequence(ids, [False] + [True] * (len(ids) - 1))
    first: Scores | None = None
    for url in target.urls:
        alone = replace(target, urls=[url])
        with alone.opened() as server:
            body = {"model": target.model, "prompt": [*ids], "max_tokens": 1}
            body["prompt_logprobs"] = target.top_k
            refused = server.ask(COMPLETIONS, body, optional=True)
            if not refused.is_success:
                raise server.failure(
                    f"does not name generate.top_k={target.top_k} ids: start vLLM with "
                    f"--max-logprobs {target.top_k}, or lower it "
                    f"({' '.join(refused.text.split())[:160]})"
                )
        scores = alone.scores([text])
        if not is_same_law(scores, alone.scores([text])):
            raise ValueError(
                f"{KEY}: {url} scores one text in two ways, as from a stale cache: start it with "
                "--no-enable-prefix-caching"
            )
        first = first or scores
        if not is_same_law(scores, first):
            raise ValueError(
                f"{KEY}: {url} and {target.urls[0]} score one text in two ways: serve one model"
            )
    assert first is not None
    return first
