"""Errors that the user can put right, in one line."""

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_line(error: Exception) -> str:
    """The one line about an error that is the user's to put right; empty for a bug."""
    number, file = getattr(error, "errno", None), getattr(error, "filename", None)
    # A library that writes by itself says it in words.
    if number in FULL or "No space left on device" in str(error):
        full = file or "the output folder"
        return (
            f"no space left on the device of {full}: free some and run the same command again "
            "(what was complete is intact), or use root=... on another device"
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{os.strerror(number)}: {file}; change its permissions, or use root=..."
    return " ".join(str(error).split()) if isinstance(error, ValueError) else ""
