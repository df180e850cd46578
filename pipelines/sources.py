"""What of the decoding a source's texts depend on."""

from draftkit.artifacts import fingerprint
from draftkit.config import Config


def decoding_hash(config: Config) -> dict[str, str]:
    """A checksum of the decoding that a source's texts depend on, where they do."""
    if config.source.name not in ("block", "replay"):
        return {}
    gamma, verification = config.decode.gamma, config.decode.verification
    used = [gamma] if config.source.name == "block" else [gamma, verification]
    return {"decode": fingerprint(used)}
