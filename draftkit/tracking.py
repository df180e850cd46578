"""Metrics of one stage: `metrics.jsonl` always, Weights & Biases as a second listener.

`metrics.jsonl` holds one JSON object a line: `section`, `step`, `time` (seconds since 1970) and
the metrics. It is the truth; W&B gets the same numbers and may be absent. wandb is imported only
when a mode needs it, never asks for an account, and writes below the stage folder.

A resumed run repeats the steps after its checkpoint. The first line that a section logs after the
file was reopened therefore drops the older lines of that section at or beyond its step, so that
the file of an interrupted run equals that of an uninterrupted one, times excluded.
"""

import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from draftkit.artifacts import write_text

FILE_NAME = "metrics.jsonl"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without the torn one that a kill may have left."""
    path = Path(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    # A line is written in one piece, so only the last can lack its end.
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a summary for listeners that know scalars only.

    An estimate `{mean, ci95: [low, high], ...}` becomes its mean and `<name>/low`, `<name>/high`;
    other dicts are joined by `/`, lists of numbers by position; null and non-finite are left out.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "mean" in value and "ci95" in value:
            low, high = value["ci95"] or (None, None)
            yield from scalars({name: value["mean"], f"{name}/low": low, f"{name}/high": high})
        elif isinstance(value, Mapping):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, list | tuple):
            yield from scalars({str(index): item for index, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, str | int) or (isinstance(value, float) and isfinite(value)):
            yield name, value


def _start_wandb(
    folder: Path, *, mode: str, config: Mapping[str, Any], labels: dict[str, Any]
) -> Any:
    """One W&B run below `folder`, held by the caller. No prompt, no console, no error reports.

    Raises ValueError when `online` has no API key: W&B itself would ask for one on a terminal.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # light import of this module; `none` never comes here

    settings = wandb.Settings(console="off", silent=True, quiet=True, disable_code=True)
    wandb.setup(settings=settings)  # artifacts print by the process's settings, not the run's
    if mode == "online":
        if not wandb.api.api_key:
            raise ValueError(
                "tracker=online needs a Weights & Biases key: run `wandb login`, set"
                " WANDB_API_KEY, or use tracker=offline"
            )
        labels |= {"resume": "allow"}
    if mode != "disabled":
        # A relaunch is the same run. Offline it writes a second folder of the same id.
        stored = folder / "wandb" / "run-id"
        if not stored.is_file():
            stored.parent.mkdir(parents=True, exist_ok=True)
            stored.write_text(secrets.token_hex(4))
        labels |= {"id": stored.read_text().strip()}
    try:
        return wandb.init(
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            config=dict(config),
            settings=settings,
            reinit="create_new",  # a stage may run inside another one's run
            **labels,
        )
    except wandb.Error as error:
        raise ValueError(
            f"Weights & Biases did not start ({error}): use tracker=offline, or"
            " tracker=none to do without"
        ) from error


class Tracker:
    """Both listeners of one stage. `folder` null records nothing (ranks other than the first)."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        mode: str = "none",
        config: Mapping[str, Any] | None = None,
        **labels: Any,
    ) -> None:
        """Reopen `folder/metrics.jsonl` and start W&B in `mode` (`none` does not import it).

        labels: what `wandb.init` takes: project, entity, group, job_type, name, tags. Raises
        ValueError where `mode` is `online` and no key is configured.
        """
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._begun: set[str] = set()  # sections that have logged since the file was opened
        self._run: Any = None
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            self._replace(read_metrics(self._path))
        if mode != "none":
            folder = self._path.parent
            self._run = _start_wandb(folder, mode=mode, config=config or {}, labels=labels)
            import wandb  # which `_start_wandb` has set up

            self._wandb = wandb

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        assert self._path is not None
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def log(self, section: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and forward `section/key` to W&B. Steps of a section must not fall.

        Non-finite values are null in the file, so that it stays JSON, and NaN in W&B.
        """
        clash = metrics.keys() & {"section", "step", "time"}
        assert not clash, f"metrics may not be called {clash}"
        numbers = {k: v if isinstance(v, int) else float(v) for k, v in metrics.items()}
        if self._path is None:
            return
        begins = section not in self._begun
        if begins:
            self._begun.add(section)
            lines = read_metrics(self._path)
            kept = [line for line in lines if line["section"] != section or line["step"] < step]
            if len(kept) < len(lines):
                self._replace(kept)
        line: dict[str, Any] = {"section": section, "step": step, "time": round(time.time(), 3)}
        line |= {key: value if isfinite(value) else None for key, value in numbers.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        axis = f"{section}/step"

        def send(run: Any) -> None:
            if begins:
                run.define_metric(axis)
                run.define_metric(f"{section}/*", step_metric=axis)
            run.log({axis: step} | {f"{section}/{key}": value for key, value in numbers.items()})

        self._tell(send)

    def _tell(self, send: Callable[[Any], None]) -> None:
        """Let W&B hear something. A listener that fails is dropped, aloud; the stage goes on."""
        if self._run is None:
            return
        try:
            send(self._run)
        except Exception as error:
            self._run = None
            warnings.warn(
                f"Weights & Biases stopped listening ({error}); metrics.jsonl goes on", stacklevel=3
            )

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final numbers for W&B, as scalars; `summary.json` is the stage's to write."""
        self._tell(lambda run: run.summary.update(dict(scalars(values))))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table in W&B, one list a row."""
        content: dict[str, Any] = {"columns": [*columns], "data": [[*row] for row in rows]}
        content |= {"allow_mixed_types": True}
        self._tell(lambda run: run.log({name: self._wandb.Table(**content)}))

    def figure(self, name: str, path: str | Path) -> None:
        """An image file as a W&B picture."""
        self._tell(lambda run: run.log({name: self._wandb.Image(str(path))}))

    def report(self, html: str) -> None:
        """A page as it is in W&B, which would add a stylesheet to load."""
        self._tell(lambda run: run.log({"report": self._wandb.Html(html, inject=False)}))

    def artifact(self, name: str, folder: str | Path, metadata: Mapping[str, Any]) -> None:
        """A model as a W&B artifact that refers to `folder` with checksums.

        Files are referred to, not copied or uploaded: weights leave the machine only by hand.
        """

        def send(run: Any) -> None:
            allowed = "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
            about = dict(scalars(metadata))
            artifact = self._wandb.Artifact(allowed[:128], type="model", metadata=about)
            root = Path(folder).resolve()
            for file in sorted(path for path in root.rglob("*") if path.is_file()):
                artifact.add_reference(file.as_uri(), name=file.relative_to(root).as_posix())
            run.log_artifact(artifact)

        self._tell(send)

    def finish(self, exit_code: int = 0) -> None:
        """Close the W&B run; call it in a `finally`. Calling it again does nothing."""
        self._tell(lambda run: run.finish(exit_code=exit_code))
        self._run = None
