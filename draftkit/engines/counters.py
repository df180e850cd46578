"""What a server that runs counts of its own speculation: vLLM, SGLang and llama.cpp.

A pass is one pass of the target over proposals, behind the one that reads the prompt and yields the
first token; tokens a pass are 1 + accepted / passes. Read before and after each answer:

    vLLM       GET /metrics    vllm:spec_decode_num_drafts, _accepted_tokens, and those by position
    SGLang     GET /metrics    sglang:spec_verify_calls; what was accepted is what it delivered
    llama.cpp  POST /completion: `timings` with draft_n and draft_n_accepted

So a server may have no other client meanwhile. In a pass that reaches behind the end of an answer
vLLM counts all that was accepted, SGLang nothing behind it; llama.cpp proposes nothing beyond the
limit, and counts all behind an end of text.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from draftkit.config import SamplingConfig
from draftkit.endpoint import COMPLETIONS, Endpoint, completion

VLLM, SGLANG, LLAMACPP = "vLLM", "SGLang", "llama.cpp"  # as draftkit.evaluation.engines has them
TOKENS = {VLLM: "vllm:generation_tokens_total", SGLANG: "sglang:generation_tokens_total"}
PASSES = {VLLM: "vllm:spec_decode_num_drafts_total", SGLANG: "sglang:spec_verify_calls_total"}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
COUNT_SECONDS, LOOK_SECONDS = 20.0, 0.01  # within which counters follow an answer; between looks


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer by its counts.

    seconds: from the request to the last token. drafted: proposals, where passes are not counted.
    limited: whether its length ended it. text: of vLLM's and SGLang's.
    """

    tokens: int
    seconds: float
    passes: int
    accepted: int
    drafted: int = 0
    limited: bool = False
    text: str = ""


class Server:
    """A server that counts. Raises ValueError, one line, for what it does not do.

    It is asked once for each answer: who tries again counts twice. gamma: proposals a pass, as its
    answers show; 0 where they show none.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.ask, self.failure, self.gamma = endpoint.ask, endpoint.failure, 0
        counters = self.counters()
        self.engine = next((one for one, name in TOKENS.items() if name in counters), LLAMACPP)
        if self.engine == LLAMACPP:
            if not (props := self.ask("/props", optional=True)).is_success:
                raise self.failure(
                    f"has no /props of llama.cpp (status {props.status_code}), and no /metrics of "
                    "vLLM or SGLang (--enable-metrics)"
                )
        elif PASSES[self.engine] not in counters:
            raise self.failure("counts no speculative decoding: start it with the drafter")
        else:
            self.model = endpoint.model()["id"]

    def answers(
        self, prompts: Sequence[Sequence[int]], *, sampling: SamplingConfig, limit: int, seed: int
    ) -> list[Answer]:
        """Continue each prompt by at most `limit` tokens, one after the other."""
        answer = self._timed if self.engine == LLAMACPP else self._counted
        made = [
            answer(completion(prompt, sampling, limit=limit, seed=seed, row=row))
            for row, prompt in enumerate(prompts)
        ]
        if sum(one.passes for one in made) == 0:
            return made
        if self.engine != LLAMACPP:
            counters = self.counters()
            positions = [name for name in counters if name.startswith(f"{ACCEPTED}_per_pos_total")]
            self.gamma = len(positions) or int(counters.get("sglang:spec_num_steps", 0))
            return made
        # Passes propose alike, but for fewer right before the limit; where a text ended, fewer
        # passes are seen than there were.
        ratios = [(one.limited, -(-one.drafted // one.passes)) for one in made if one.passes]
        limited = [ratio for whole, ratio in ratios if whole]
        self.gamma = max(limited) if limited else min(ratio for _, ratio in ratios)
        return [
            one if one.limited else replace(one, passes=one.drafted // self.gamma) for one in made
        ]

    def counters(self) -> dict[str, float]:
        """Counters and gauges by name and position, summed over the engines behind the server."""
        counters: dict[str, float] = {}
        response = self.ask("/metrics", optional=True)
        families = text_string_to_metric_families(response.text) if response.is_success else ()
        for sample in (sample for family in families for sample in family.samples):
            name = sample.name + sample.labels.get("position", "")
            counters[name] = counters.get(name, 0.0) + sample.value
        return counters

    def _counted(self, body: Mapping[str, Any]) -> Answer:
        """One answer of vLLM or SGLang, between two readings of the counters."""
        before = self.counters()
        response = self.ask(COMPLETIONS, {**body, "model": self.model})
        made = response.json()
        tokens, text = int(made["usage"]["completion_tokens"]), made["choices"][0]["text"]
        latest = time.perf_counter() + COUNT_SECONDS
        gained: dict[str, int] = {}
        while gained.get(TOKENS[self.engine], 0) < tokens:  # they follow a moment later
            if time.perf_counter() > latest:
                raise self.failure("does not count its answers in /metrics")
            time.sleep(LOOK_SECONDS)
            after = self.counters()
            gained = {name: int(value - before.get(name, 0)) for name, value in after.items()}
        if gained[TOKENS[self.engine]] > tokens:
            raise self.failure("counts other clients' tokens too: measure it alone")
        passes = gained[PASSES[self.engine]]
        is_counted = self.engine == VLLM
        accepted = gained[f"{ACCEPTED}_total"] if is_counted else max(0, tokens - 1 - passes)
        seconds = response.elapsed.total_seconds()
        return Answer(tokens=tokens, seconds=seconds, passes=passes, accepted=accepted, text=text)

    def _timed(self, body: Mapping[str, Any]) -> Answer:
        """One answer of llama-server. Each of its tokens that was no accepted proposal is of a pass
        of its own, the first one of the prompt's; an end of text cuts what a pass accepted."""
        limit = body["max_tokens"]
        response = self.ask(
            "/completion",
            {
                **{key: body[key] for key in ("prompt", "seed", "temperature", "top_p", "min_p")},
                **{"n_predict": limit, "top_k": max(body["top_k"], 0), "cache_prompt": False},
                "repeat_penalty": body["repetition_penalty"],
                "repeat_last_n": len(body["prompt"]) + limit,  # all of the text
                **{"typical_p": 1.0, "samplers": ["penalties", "temperature", "top_k", "top_p"]},
            },
        )
        made = response.json()
        timings = made["timings"]
        tokens, accepted = int(timings["predicted_n"]), int(timings.get("draft_n_accepted", 0))
        drafted = int(timings.get("draft_n", 0))
        return Answer(
            tokens=tokens,
            seconds=response.elapsed.total_seconds(),
            passes=max(0, tokens - 1 - accepted) if drafted else 0,
            accepted=accepted,
            drafted=drafted,
            limited=made.get("stop_type") == "limit",
        )
