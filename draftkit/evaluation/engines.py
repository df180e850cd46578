"""What other engines would accept of a drafter: which row of acceptance is theirs.

Engines differ in how they draft and verify, so one drafter has several acceptance rates. Tokens a
pass of the target follow from the texts that were scored, in the mode and at the gamma of each
engine; no engine is run, and nothing is said of the time that its passes take.

Facts about the engines: their documentation and source, November 2026 (vLLM 0.33, SGLang 0.5.23,
llama.cpp 0.5, transformers 5.23, ONNX Runtime GenAI 0.18, mlx-lm 0.32).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftkit.evaluation.alpha import UNCUT, PromptTotals
from draftkit.evaluation.intervals import acceptance_length, proportion
from draftkit.models.head_files import P_EAGLE
from draftkit.models.heads import EAGLE3, MEDUSA
from draftkit.models.parallel import ENCODER_DECODER

SAMPLED, ARGMAX, MATCHED = "alpha", "alpha_greedy_draft", "alpha_exact_match"


@dataclass(frozen=True)
class EngineSetting:
    """One way to run an engine with a drafter.

    `probabilistic` is vLLM's draft_sample_method, `threshold` assistant_confidence_threshold.
    gamma: None where the user names it. cuts_draft: whether top-k and top-p cut the draft's
    distribution as they cut the target's.
    """

    engine: str
    name: str
    mode: str
    gamma: int | None = None
    cuts_draft: bool = True
    in_one_pass: bool = False  # whether a parallel drafter proposes as it was trained to


# The row of draftkit's own decoder, by the mode that is served.
OWN = {
    mode: EngineSetting("draftkit", name, mode, in_one_pass=True)
    for mode, name in ((SAMPLED, "sampled"), (ARGMAX, "argmax"), (MATCHED, "equal tokens"))
}
# Of each engine its default first, then the best that it offers. By default transformers stops
# below a confidence that it moves after every pass, which texts cannot tell.
SETTINGS = (
    EngineSetting("vLLM", "argmax", ARGMAX, in_one_pass=True),
    EngineSetting("vLLM", "probabilistic", SAMPLED, cuts_draft=False, in_one_pass=True),
    EngineSetting("SGLang", "argmax", ARGMAX, gamma=3),
    EngineSetting("llama.cpp", "argmax", ARGMAX, gamma=3),
    EngineSetting("transformers", "threshold 0", SAMPLED),
    EngineSetting("ONNX Runtime", "sampled", SAMPLED, gamma=4),
    EngineSetting("mlx-lm", "equal tokens", MATCHED, gamma=3),
)
# The engines that serve a kind of drafter; all of them where none is named.
SERVED_BY = {
    ENCODER_DECODER: ("transformers",),
    EAGLE3: ("vLLM", "SGLang", "llama.cpp"),
    P_EAGLE: ("vLLM",),
    MEDUSA: (),
}
# The setting in which export and cards start an engine, by its name in their summaries.
LAUNCHED = {
    "hf": ("transformers", "threshold 0"),
    "vllm": ("vLLM", "probabilistic"),
    "sglang": ("SGLang", "argmax"),
    "llamacpp": ("llama.cpp", "argmax"),
    "onnx": ("ONNX Runtime", "sampled"),
}


def serves(engine: str, kind: str | None) -> bool:
    """Whether `engine`, which may be draftkit, serves drafters of `kind`."""
    return engine == "draftkit" or kind not in SERVED_BY or engine in SERVED_BY[kind]


def drafted_as(setting: EngineSetting, scored: PromptTotals) -> tuple[PromptTotals, str]:
    """The scores of a drafter that proposes as `setting` does, and the mode in which it counts."""
    uncut = not setting.cuts_draft and UNCUT in scored.totals
    drafted = scored.one_by_one if scored.in_one_pass and not setting.in_one_pass else scored
    return drafted, UNCUT if uncut else setting.mode


def engine_rows(
    scored: PromptTotals,
    *,
    own: str | None = SAMPLED,
    gamma: int,
    best_gammas: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Acceptance and tokens a pass of each setting, as the summary holds them.

    own: the mode that draftkit's decoder is served in; without one it has no row. gamma: where the
    engine leaves it to its user. best_gammas: by mode; with them a row also says the tokens a pass
    of so many proposals, of one at least, as launch.md sets them.
    """
    rows = []
    for setting in (*([OWN[own]] if own else []), *SETTINGS):
        drafted, mode = drafted_as(setting, scored)
        proposals = setting.gamma or max(gamma, 1)
        length = acceptance_length(drafted.tokens_a_pass(mode, proposals), proposals)
        row: dict[str, Any] = {
            "engine": setting.engine,
            "setting": setting.name,
            "mode": mode,
            "gamma": proposals,
            "acceptance": proportion(scored.rate(mode)).as_dict(),
            "acceptance_length": length.as_dict(),
        }
        if best_gammas is not None:
            best = max(best_gammas[mode], 1)
            length = acceptance_length(drafted.tokens_a_pass(mode, best), best)
            row["at_best_gamma"] = {"gamma": best, "acceptance_length": length.as_dict()}
        rows.append(row)
    return rows


def launched_row(judged: Mapping[str, Any], engine: str) -> Mapping[str, Any] | None:
    """The row of a summary that is about the launched setting of `engine`; None without one."""
    for row in judged.get("engines", ()):
        if (row["engine"], row["setting"]) == LAUNCHED[engine]:
            return row
    return None


def best_gamma_of(judged: Mapping[str, Any], engine: str) -> int:
    """The best gamma by a summary for the launched setting of `engine`; 0: not to speculate.

    That of the acceptance in the setting's mode, where the summary knows it: of what the engine
    accepts, and not of what draftkit's decoder does.
    """
    row, best = launched_row(judged, engine), judged["best_gamma"]
    return best if row is None else judged.get("best_gamma_by_mode", {}).get(row["mode"], best)
