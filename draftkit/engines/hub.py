"""An exported folder on the hub: model card, weights and tokenizer in one commit."""

from pathlib import Path

from draftkit.artifacts import first_line
from draftkit.models.files import CARD, MODEL_FILES


def upload(folder: Path, repository: str) -> str:
    """Upload the model in `folder`, and its card, to `repository`, made private where it is new.

    Nothing else: what lies beside it names folders of this machine.

    Returns the address of the commit. The token is that of `hf auth login` or HF_TOKEN. Raises
    ValueError naming `export.push_to_hub` where the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[*MODEL_FILES, CARD],
            commit_message="A draft model for speculative decoding",
        )
    except (HFValidationError, OSError, HTTPError) as error:
        reason = first_line(error)[:200].rstrip(".")
        raise ValueError(
            f"export.push_to_hub={repository}: {reason}: log in with `hf auth login`, or leave "
            "it out: the folder is written without it"
        ) from error
    return commit.commit_url
