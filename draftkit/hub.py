"""Whether a name of the hub is within reach: looked up once, before libraries that try many times.

A name that cannot be fetched is refused in seconds, by one line, and not after a dozen lines of
retries. What is in the cache on this machine needs no network. Downloads nothing.
"""

from typing import Literal

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, HTTPError

from draftkit.artifacts import first_line

Kind = Literal["model", "dataset"]


def hub_has(
    name: str, file: str, *, section: str, kind: Kind = "model", revision: str | None = None
) -> bool:
    """Whether the repository `name` has `file`, and hands it out.

    section: the one whose `path` is `name`. Raises ValueError, one line, where nothing can be known
    because the hub does not answer, and where it wants its conditions accepted first.
    """
    where = f"{section}.path {name}"
    try:
        known = try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
        if known is not None:
            return isinstance(known, str)  # else it is known to be absent
        return HfApi().file_exists(name, file, repo_type=kind, revision=revision)
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{name}"
        raise ValueError(
            f"{where}: the hub hands it to readers who accept its conditions: do so on {page}, and "
            "log in with `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{where}: no folder here, and no name of the hub: correct it") from error
    except HfHubHTTPError as error:
        return error.response.status_code >= 500  # it is busy, and libraries try again
    except (HTTPError, OSError) as error:
        options = f" --revision {revision}" * (revision is not None)
        options += " --repo-type dataset" * (kind == "dataset")
        use = (
            f"{section}.path=FOLDER" if kind == "model" else f"{section}=local {section}.path=FILE"
        )
        raise ValueError(
            f"{where}: no folder here, not in the hub's cache, and {constants.ENDPOINT} does not "
            f"answer ({first_line(error)}): be online, or fetch it where you are (`hf download "
            f"{name}{options} --local-dir FOLDER`) and give {use}"
        ) from error
