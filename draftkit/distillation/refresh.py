"""Texts sampled with the draft of one step, for that step and some after it, as Parquet files.

With `refresh_steps` R the texts of steps kR .. kR + R - 1 are sampled at step kR, with its weights,
so none is older than R - 1 steps. A run that goes on inside such a block reads its texts from
`step-<kR>.parquet`; one that goes on at its start samples them again, which gives the same. A file
is deleted once no checkpoint can lead back into its block: at any time at most
save_steps / R + 2 of them exist. This module neither samples nor trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.config import OptimConfig
from draftkit.data.rollouts import Record, read_records, write_records


@dataclass(frozen=True, kw_only=True)
class RolloutFiles:
    """The files of `folder`, a block of `refresh_steps` steps each.

    `optim` says how many steps there are, and after how many at most a checkpoint is written. Of
    several processes that train together each has files of its own, told apart by `suffix`.
    """

    folder: Path
    refresh_steps: int
    optim: OptimConfig
    suffix: str = ""

    def first_step(self, step: int) -> int:
        """The step that samples the texts of `step`."""
        return step - step % self.refresh_steps

    def steps(self, step: int) -> range:
        """The steps of the block that begins at `step`."""
        return range(step, max(step + 1, min(step + self.refresh_steps, self.optim.max_steps)))

    def path(self, step: int) -> Path:
        """Where the texts of `step` lie."""
        return self.folder / f"step-{self.first_step(step):08d}{self.suffix}.parquet"

    def write(self, step: int, records: Sequence[Record]) -> None:
        """Keep the texts of the block that begins at `step`, and forget what is over."""
        write_records(self.path(step), records)
        # Checkpoints come at least at the multiples of save_steps, before the next batch.
        oldest = self.path(step - step % self.optim.save_steps)
        for path in self.folder.glob(f"step-????????{self.suffix}.parquet"):
            if path.name < oldest.name:
                path.unlink()

    def read(self, step: int) -> list[Record]:
        """The texts of the block of `step`. Raises ValueError where they are gone or damaged."""
        try:
            return read_records(self.path(step))
        except ValueError as error:
            raise ValueError(
                f"{self.path(step)}: a run that goes on at step {step} needs it, and it is gone or"
                " damaged: overwrite=true starts the run anew"
            ) from error
