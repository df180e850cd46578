"""How each engine is started with a drafter, and the acceptance to expect: launch.md, and a card.

Text alone; nothing is run here. Options are those of vLLM 0.33, SGLang 0.5.23, llama.cpp 0.5,
transformers 5.23 and ONNX Runtime GenAI 0.18, in `templates/engines.md` and `launch.md`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.config import SamplingConfig
from draftkit.evaluation.engines import ARGMAX, LAUNCHED, best_gamma_of, launched_row, serves
from draftkit.evaluation.page import as_markdown, decision_page
from draftkit.templates import render

ON_CARD = ("vllm", "sglang", "llamacpp", "hf")  # in this order
Judged = Mapping[str, Any] | None  # the summary of an evaluation


def launched_gammas(judged: Judged, gamma: int, *, kind: str) -> dict[str, int]:
    """Proposals a round with which each engine is started that serves a drafter of `kind`: the best
    by what it accepts, at least one; `gamma` where nothing was judged."""
    engines = [name for name, (engine, _) in LAUNCHED.items() if serves(engine, kind)]
    if judged is None:
        return dict.fromkeys(engines, gamma)
    return {engine: max(best_gamma_of(judged, engine), 1) for engine in engines}


def expected(judged: Judged, engine: str) -> dict[str, Any] | None:
    """What the evaluation predicts of the launched setting of `engine`; None where it does not.

    acceptance: of a proposal that is tested; acceptance_length: tokens a pass of the target, at
    `gamma` proposals.
    """
    row = launched_row(judged, engine) if judged else None
    if judged is None or row is None:
        return None
    length = row.get("at_best_gamma", row)
    return {
        "temperature": judged["temperature"],
        "acceptance": row["acceptance"],
        "gamma": length["gamma"],
        "acceptance_length": length["acceptance_length"],
    }


def on_hub(target: str | None) -> bool:
    """Whether the target is named on the hub, and is no folder or file of this machine."""
    return target is not None and not Path(target).exists() and not Path(target).is_absolute()


def model_card(
    judged: dict[str, Any] | None, *, target: str | None, name: str, kind: str, gamma: int = 1
) -> str:
    """The card of a drafter: its page in short where it was judged, and how engines serve it.

    judged: the summary of its evaluation. target: the folder or hub name of its target; a folder is
    not named, since a card goes where the model goes. name: of the experiment. gamma: the proposals
    a round where nothing was judged.
    """
    gammas = launched_gammas(judged, gamma, kind=kind)
    shown = {LAUNCHED[engine][0]: engine for engine in ON_CARD if engine in gammas}
    return render(
        "card.md",
        gammas=gammas,
        kind=kind,
        target=target if on_hub(target) else None,
        report=as_markdown(decision_page(judged, name=name)) if judged else None,
        best={one: best_gamma_of(judged, shown[one]) for one in shown} if judged else {},
    )


def launch_text(
    target: str,
    *,
    revision: str | None,
    gammas: Mapping[str, int],
    judged: Judged,
    kind: str,
    sampling: SamplingConfig,
) -> str:
    """The commands of each engine of `gammas`, to be run in the exported folder, and what to expect
    of it.

    target: its folder or its name on the hub, pinned to `revision`. kind: of the drafter. sampling:
    as is served, which ONNX Runtime has to be told.
    """
    rows = {engine: launched_row(judged, engine) for engine in gammas} if judged else {}
    return render(
        "launch.md",
        gammas=gammas,
        kind=kind,
        target=target,
        on_hub=on_hub(target),
        revision=revision,
        judged=judged,
        titles={engine: name for engine, (name, _) in LAUNCHED.items()},
        expected={engine: expected(judged, engine) for engine in gammas},
        argmax=[engine for engine, row in rows.items() if row and row["mode"] == ARGMAX],
        best={engine: best_gamma_of(judged, engine) for engine in gammas} if judged else {},
        search={
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
    )
