"""What a recording proxy asks an engine for beside a client's request, and what it keeps.

Knows bodies and replies of OpenAI's API as parsed JSON, and no sockets. A request is recorded where
every setting that it names is known and its answer has the law of temperature, top-k, top-p and
repetition penalty: another penalty, a grammar or a bias gives texts of another law, by which no
gate can judge. Ids come from the engine where it knows `return_token_ids` (vLLM), else from the
tokenizer, which may cut a text otherwise than it was sampled.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from draftkit.config import SamplingConfig
from draftkit.data.messages import read_messages
from draftkit.data.rollouts import Record
from draftkit.endpoint import ASKED, IDS, PROMPT_IDS
from draftkit.online.buffer import Served
from draftkit.serving.intake import Texts, conversation_of

SAMPLER = "engine"  # also the version of its drafter, where that is not known
LAW = ("temperature", "top_k", "top_p", "repetition_penalty")
# What else a request may name: what leaves the law as it is, whatever it says, ...
FREE = frozenset(
    (
        *("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "seed"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "stream", "stream_options"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_tokens_as_token_ids", ASKED),
        *("chat_template_kwargs", "reasoning_effort", "session_id", "stream_interval"),
        *("documents", "skip_special_tokens", "spaces_between_special_tokens", "priority"),
        *("request_id", "cache_salt", "cache_prompt", "timings_per_token", "id_slot"),
    )
)
# ... and what does at these values; null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("ignore_eos", "echo", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_reasoning", "add_generation_prompt", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids"), ({}, [])),
    **{"tool_choice": ("auto", "none"), "response_format": ({"type": "text"},)},
    **{"modalities": (["text"],), "suffix": ("",), "watermarking": (False,)},
}
# By these a template may write another prompt than ours.
UNTOLD = ("tools", "documents", "chat_template_kwargs", "reasoning_effort")
LEAST_TEMPERATURE = 0.01  # of vLLM, above 0
# How many requests wait, as vLLM, SGLang and llama.cpp say it, a line for each engine behind them.
WAITING = re.compile(
    rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs|llamacpp:requests_deferred)"
    rb"(?:\{.*\})? (\d+(?:\.\d+)?(?:e\+\d+)?)$",
    re.MULTILINE,
)


def is_recordable(body: Any) -> bool:
    """Whether the answers to `body` have the law that its record would say."""
    if not isinstance(body, dict):
        return False
    for name, value in body.items():
        if value is None or name in FREE:
            continue
        if name == "tools":
            if not isinstance(value, list) or any(map(_is_strict, value)):
                return False
        elif name in LAW:
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
        elif not any(value == one for one in NEUTRAL.get(name, ())):
            return False
    return True


def _is_strict(tool: Any) -> bool:
    """Whether an engine may hold calls of `tool` to a grammar."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return not isinstance(function, dict) or bool(function.get("strict"))


def sampling_of(body: Mapping[str, Any], default: SamplingConfig) -> dict[str, float]:
    """The law of the answers to `body` at an engine whose own settings are `default`."""
    named = {name: body[name] for name in LAW if body.get(name) is not None}
    law = {name: float(value) for name, value in (vars(default) | named).items()}
    if law["temperature"] > 0:
        law["temperature"] = max(law["temperature"], LEAST_TEMPERATURE)
    return law | {"top_k": max(0.0, law["top_k"])}  # -1 cuts nothing either


def waiting_in(metrics: bytes) -> int:
    """How many requests wait at the engine, by what it has at /metrics; 0 where it does not say."""
    return int(sum(map(float, WAITING.findall(metrics))))


@dataclass
class Choice:
    """One answer as far as it has come."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    has_more: bool = False  # than text: reasoning or calls, whose tokens the text does not tell
    finish: str | None = None


class Exchange:
    """One request that may be recorded, and its reply, whole or event by event.

    body: what the engine is sent. length: bytes that the client sent. has_ids: whether the engine
    tells the ids of what it reads and writes, for which it is asked here.
    """

    def __init__(self, body: dict[str, Any], *, length: int, has_ids: bool) -> None:
        self.asks = has_ids and not body.get(ASKED)  # for what the client did not
        self.body = {**body, ASKED: True} if self.asks else body
        self._has_ids, self._usage, self._length = has_ids, 0, length
        self._choices: dict[int, Choice] = {}
        self.speculation: Served | None = None

    def take(self, part: Any) -> bool:
        """Take in a reply, or an event of one, and blank in it what was asked for here.

        False for an event that the engine sent for that alone.
        """
        if not isinstance(part, dict):
            return True
        is_visible = not self.asks
        shared = part.get(PROMPT_IDS)  # of a chat
        for one in part.get("choices") or ():
            choice = self._choices.setdefault(one.get("index", 0), Choice())
            message = one.get("message") or one.get("delta") or {"content": one.get("text")}
            choice.text += message.get("content") or ""
            others = (message[key] for key in message.keys() - {"role", "content"})
            choice.has_more |= any(others)
            choice.prompt_ids = shared or one.get(PROMPT_IDS) or choice.prompt_ids
            choice.output_ids += one.get(IDS) or ()
            choice.finish = one.get("finish_reason") or choice.finish
            ends = one.get("finish_reason") or one.get("logprobs")
            is_visible |= one.get("delta") != {} or bool(ends)
            self._blank(one)
        self._blank(part)
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # of another release
            self._usage = int((part.get("usage") or {}).get("completion_tokens") or self._usage)
            self._speculated(part)
        return is_visible or not part.get("choices")

    def _blank(self, part: dict[str, Any]) -> None:
        """Say of ids what the engine says that was not asked for them: null."""
        if self.asks:
            part |= {name: None for name in (PROMPT_IDS, IDS) if name in part}

    def _speculated(self, part: Mapping[str, Any]) -> None:
        """The acceptance of the request, where vLLM reports it
        (--per-request-spec-decode-metrics)."""
        counts = (part.get("metrics") or {}).get("speculative_decoding")
        if not counts:
            return
        accepted, steps = counts["num_accepted_draft_tokens"], counts["num_spec_steps"]
        most, histogram = counts["num_spec_tokens"], counts["acceptance_histogram"]
        refused = sum(histogram[:most])
        self.speculation = Served(
            route="",
            version=SAMPLER,
            rounds=steps,
            drafted=counts["num_draft_tokens"],
            accepted=accepted,
            tested=accepted + refused,
            acceptance=float(accepted),
        )

    @property
    def tokens(self) -> int:
        """Those of the answers that have ended, as far as the engine tells."""
        return sum(len(one.output_ids) for _, one in self.answers()) or self._usage

    @property
    def size(self) -> int:
        """About how many numbers are held here: four characters take the room of one."""
        choices = self._choices.values()
        characters = self._length + sum(len(one.text) for one in choices)
        return characters // 4 + sum(len(one.prompt_ids) + len(one.output_ids) for one in choices)

    def answers(self) -> list[tuple[int, Choice]]:
        """The answers that have ended, by their number."""
        return [(index, one) for index, one in sorted(self._choices.items()) if one.finish]

    def records(self, texts: Texts, default: SamplingConfig, version: str = "") -> list[Record]:
        """Records of the answers that have ended, drafted by `version`; none of one whose ids are
        not known."""
        messages, seed = self.body.get("messages"), self.body.get("seed")
        document = "" if messages is None else conversation_of(read_messages(messages))
        made = []
        for index, choice in self.answers():
            if not self._has_ids:
                choice = self._tokenised(choice, index, texts)
            known = [*choice.prompt_ids, *choice.output_ids]
            if not choice.prompt_ids or not choice.output_ids or max(known) >= texts.vocab_size:
                continue
            made.append(
                Record(
                    prompt_ids=choice.prompt_ids,
                    output_ids=choice.output_ids,
                    sampler=SAMPLER,
                    sampler_version=version,
                    sampling=sampling_of(self.body, default),
                    seed=seed % 2**63 if isinstance(seed, int) else 0,
                    row=index,
                    document=document,
                )
            )
        return made

    def _tokenised(self, choice: Choice, index: int, texts: Texts) -> Choice:
        """`choice` with the ids of its texts; without any where text does not tell them."""
        body = self.body
        if choice.has_more or not choice.text or any(body.get(name) for name in UNTOLD):
            return Choice()
        if body.get("skip_special_tokens") is False or body.get("repetition_penalty", 1) != 1:
            return Choice()  # as an engine may not know the one, and shows marks by the other
        ends = choice.finish == "stop" and not (body.get("stop") or body.get("stop_token_ids"))
        if (messages := body.get("messages")) is not None:
            turns = read_messages(messages)
            if turns[-1]["role"] == "assistant":  # which some engines go on with
                return Choice()
            return Choice(texts.chat(turns), texts.answer(choice.text, ends=ends, chat=turns))
        prompt = prompt_of(body.get("prompt"), index // int(body.get("n") or 1))
        prompt = texts.encode(prompt) if isinstance(prompt, str) else prompt
        return Choice(prompt, texts.answer(choice.text, ends=ends))


def prompt_of(given: Any, number: int) -> Any:
    """A prompt, text or ids, of those that a completion may have."""
    many = isinstance(given, list) and not all(isinstance(one, int) for one in given)
    return given[number] if many else given
