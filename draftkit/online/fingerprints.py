"""What a service's records and drafters were made with, as fingerprints by configuration key.

Weights of one target say nothing of another, ids of one tokenizer mean nothing in another, and a
refitted drafter is no other starting drafter's successor. Whoever opens the service tells what it
is for; this module does not know how fingerprints are made.
"""

from collections.abc import Mapping
from pathlib import Path


def require_same(path: Path, *, stored: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise ValueError, one line, naming the keys whose fingerprints differ, and what to do then.

    `stored` is empty where it was never told what the content of `path` is made with.
    """
    if stored == wanted:
        return
    names = [key for key in {**wanted, **stored} if stored.get(key) != wanted.get(key)]
    reason = f"was made with another {' and '.join(names)}"
    if not stored:
        reason = f"does not tell with which {' and '.join(names)} it was made"
    raise ValueError(
        f"{path} {reason}: use name=... for another service, or overwrite=true to begin this one "
        "anew, which deletes its records and all its drafter versions"
    )
