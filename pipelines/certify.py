"""What `evaluate` does with `certify.with=URL certify.without=URL`: is a server's text its own?

Asks two servers of one target, with a drafter and without, for answers to held-out prompts by
OpenAI's HTTP API: greedy ones, and at a temperature above 0 also sampled ones of gamma + 2 tokens
(`decode.gamma`: the proposals a pass). No model is loaded. OPENAI_API_KEY is sent if it is set.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from draftkit.artifacts import read_json
from draftkit.config import SERVERS, Config, SamplingConfig
from draftkit.data.splits import read_splits
from draftkit.endpoint import COMPLETIONS, OTHERWISE, Endpoint, completion
from draftkit.evaluation.certificate import Answer, same_greedy, same_law
from draftkit.evaluation.intervals import LEAST_UNITS

from .plan import answer_tokens
from .product import SUMMARY
from .stage import StageFolder

DIFFERENT = 3  # the exit code of servers that get no certificate
SAMPLED_PROMPTS, SAMPLES = 24, 256  # many answers to one prompt see more than few to many
LIKELIEST = 2  # tokens whose log-probabilities are asked for
SAME_MODEL = 0.1  # nats by which the log-probabilities of a first token may differ
WORDS = {True: "passed", False: "FAILED", None: "no power"}
FORMS = {
    "temperature": "if the temperature is another one",
    "repeats": "if one answer stands in place of others",
}


def check(config: Config) -> None:
    """Raise ValueError for a server that does not answer, before anything is made for it."""
    for name in SERVERS:
        with Endpoint(f"certify.{name}", config.certify[name]) as server:
            server.model()


def show(config: Config, folder: Path) -> None:
    """Print a complete certificate."""
    summary = read_json(folder / SUMMARY)
    greedy, sampled = summary["greedy"], summary["sampled"]
    equal = greedy["compared"] - greedy["statistic"]
    print(
        f"greedy: {WORDS[greedy['passed']]}, {equal} of {greedy['compared']} answers are equal, "
        f"{greedy['near_ties']} part at near-ties ({greedy['rounding_nats']:.1g} nats)"
    )
    if sampled:
        print(
            f"temperature {config.sampling.temperature:g}: {WORDS[sampled['passed']]}, "
            f"p = {sampled['p_value']:.3f}, {sampled['answers'][0]} answers a server\n"
            f"    compared: {sampled['method']}\n"
            f"    would be seen with 90 % power at level {sampled['level']:g}, in total variation:"
        )
        ranked = sorted(sampled["biases"].items(), key=lambda one: -(one[1] or math.inf))
        for form, bias in ranked:
            print(f"    {'none' if bias is None else f'{bias:.3f} or more'}, {FORMS[form]}")
    verdict = "CERTIFIED" if summary["certified"] else "NOT CERTIFIED"
    print(f"{verdict}: {config.certify['with']} against {config.certify['without']}", flush=True)


def answers(server: Endpoint, bodies: Sequence[dict[str, Any]], *, at_once: int) -> list[Answer]:
    """The server's answer to each body of a completion, `at_once` at a time."""
    model = server.model()

    async def answer(body: dict[str, Any]) -> Answer:
        body |= {"model": model["id"], "logprobs": LIKELIEST}
        if model.get("owned_by") == "llamacpp":
            body |= {"n_probs": LIKELIEST, "repeat_penalty": body["repetition_penalty"]}
        response = await server.send(COMPLETIONS, body)
        try:
            scores = response.json()["choices"][0]["logprobs"]
            if "content" not in scores:
                return Answer(scores["tokens"], scores["top_logprobs"])
            tokens = scores["content"]  # llama.cpp scores completions as others score chats
            tops = [{one["token"]: one["logprob"] for one in t["top_logprobs"]} for t in tokens]
            return Answer([token["token"] for token in tokens], tops)
        except OTHERWISE as error:
            raise server.failure("returns no log-probabilities of its tokens") from error

    return server.map(answer, bodies, at_once=at_once)


def certify(config: Config, folder: StageFolder) -> dict[str, Any]:
    """The certificate: both tests of what the two servers answer."""
    prompts = [list(one.prompt_ids) for one in read_splits(folder.inputs["texts"]).test]
    prompts = prompts[: config.evaluate.prompts]
    if len(prompts) < LEAST_UNITS:
        raise ValueError(
            f"certify: {len(prompts)} held-out prompts, and {LEAST_UNITS} are needed: raise "
            "evaluate.prompts or data.test_fraction, or give more text"
        )
    servers = [Endpoint(f"certify.{name}", config.certify[name]) for name in SERVERS]
    batch = config.evaluate.batch_size

    def ask(side: int, sampling: SamplingConfig, limit: int, at_once: int = batch) -> list[Answer]:
        """Answers to the prompts in turn; no two of them, nor of the servers, have one seed."""
        repeated = prompts[:SAMPLED_PROMPTS] * SAMPLES if sampling.temperature else prompts
        bodies = [
            completion(prompt, sampling, limit=limit, seed=config.seed, row=side + 2 * number)
            for number, prompt in enumerate(repeated)
        ]
        return answers(servers[side], bodies, at_once=at_once)

    with servers[0], servers[1]:
        folder.note(f"greedy answers to {len(prompts)} prompts")
        greedy, limit = replace(config.sampling, temperature=0.0), answer_tokens(config)
        drafted, plain = ask(0, greedy, limit), ask(1, greedy, limit)
        firsts = [(one.tokens[0], one.likeliest[0]) for one in plain]
        others = [one.likeliest[0] for one in drafted]
        apart = [
            abs(a[token] - b.get(token, -1e9)) for (token, a), b in zip(firsts, others, strict=True)
        ]
        if median(apart) > SAME_MODEL:
            raise servers[0].failure(
                "serves another model than certify.without: log-probabilities of first tokens, "
                "which no drafter proposes, differ"
            )
        identity = same_greedy(plain, ask(1, greedy, limit, at_once=1), drafted)
        if not config.sampling.temperature:
            return {"greedy": identity, "sampled": None, "certified": identity["passed"]}
        gamma, count = config.proposals, len(prompts[:SAMPLED_PROMPTS])
        folder.note(f"{SAMPLES} sampled answers to {count} of them, of {gamma + 2} tokens")
        sides = (ask(side, config.sampling, gamma + 2) for side in range(2))
        by_prompt = ([made[at::count] for at in range(count)] for made in sides)
        sampled = same_law(*by_prompt, gamma=gamma, seed=config.seed)
        certified = identity["passed"] and sampled["passed"] is True
        return {"greedy": identity, "sampled": sampled, "certified": certified}
