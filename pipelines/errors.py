"""Errors that the user can put right, in one line."""

import errno


def disk_is_full(error: BaseException) -> bool:
    """Whether `error` says so, as an OSError or in the words of a library that wraps it."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return full or "No space left on device" in str(error)


def user_line(error: Exception) -> str:
    """The one line about an error that is the user's to put right; empty for a bug."""
    if disk_is_full(error):
        full = getattr(error, "filename", None) or "the output folder"
        return f"no space left on the device of {full}: free some, or use root=..."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}: {error.filename}; change its permissions, or use root=..."
    return " ".join(str(error).split()) if isinstance(error, ValueError) else ""
