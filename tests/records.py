"""Records of the target's answers, of which the text and its sampling matter alone."""

from collections.abc import Iterable, Sequence

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.generation import Completion


def record(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    row: int = 0,
) -> Record:
    """An answer under `sampling`; None: of which nothing is known."""
    return Record(
        prompt_ids=[*prompt_ids],
        output_ids=[*output_ids],
        sampler="target",
        sampler_version="",
        sampling={} if sampling is None else dict(vars(sampling)),
        seed=seed,
        row=row,
    )


def records_of(
    answers: Iterable[Completion], sampling: SamplingConfig, *, seed: int = 0
) -> list[Record]:
    """Answers that were decoded under `sampling`, whose rows count from 0."""
    return [
        record(one.prompt_ids, one.output_ids, sampling=sampling, seed=seed, row=row)
        for row, one in enumerate(answers)
    ]
