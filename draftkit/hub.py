"""Whether a name of the hub is within reach: looked up once, before libraries that try many times.

A name that cannot be fetched is refused in seconds, by one line, and not after a dozen lines of
retries. What is in the cache on this machine needs no network. Downloads nothing.
"""

from typing import Literal

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RevisionNotFoundError,
)

from draftkit.artifacts import first_line

Kind = Literal["model", "dataset"]
REFUSED = (401, 403, 404)


def hub_has(
    name: str, file: str, *, section: str, kind: Kind = "model", revision: str | None = None
) -> bool:
    """Whether the repository `name` has `file`.

    section: the one whose `path` is `name`. Raises ValueError, one line, where nothing can be known
    because the hub does not answer, and where it has no such repository or does not hand it out.
    """
    key = f"{section}.path {name}"
    try:
        known = try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
        if known is not None:
            return isinstance(known, str)  # else it is known to be absent
        if is_offline_mode():
            cause = "HF_HUB_OFFLINE is set: unset it"
            raise ValueError(_out_of_reach(name, section, kind, revision, cause))
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind, revision=revision))
    except EntryNotFoundError:
        return False
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{name}"
        raise ValueError(
            f"{key}: the hub hands it to readers who accept its conditions: do so on {page}, and "
            "log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{section}.revision {revision}: the hub's {name} has no such revision: correct it"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in REFUSED:
            raise ValueError(
                f"{key}: no folder here, and no {kind} of the hub, unless a private one: correct "
                "the name, or log in with `hf auth login`"
            ) from error  # otherwise the hub is busy, and libraries try again
    except HFValidationError as error:
        raise ValueError(f"{key}: no folder here, and no name of the hub: correct it") from error
    except (HTTPError, OSError) as error:
        cause = f"{constants.ENDPOINT} does not answer ({first_line(error)}): be online"
        raise ValueError(_out_of_reach(name, section, kind, revision, cause)) from error
    return True


def _out_of_reach(name: str, section: str, kind: Kind, revision: str | None, cause: str) -> str:
    options, use = "", f"{section}.path=FOLDER"
    if revision is not None:
        options += f" --revision {revision}"
    if kind == "dataset":
        options += " --repo-type dataset"
        use = f"{section}=local {section}.path=FOLDER/FILE"
    return (
        f"{section}.path {name}: no folder here, not in the hub's cache, and {cause}, or fetch "
        f"it where you are (`hf download {name}{options} --local-dir FOLDER`) and give {use}"
    )
