"""Errors that the user can put right, in one line."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def user_line(error: Exception) -> str:
    """The one line about an error that is the user's to put right; empty for a bug."""
    system = error if isinstance(error, OSError) else OSError()
    # A library that writes by itself says it in words.
    if system.errno in FULL or "No space left on device" in str(error):
        return (
            f"no space left on the device of {system.filename or 'the output folder'}: free some "
            "and run the same command again (what was complete is intact), or use root=... on "
            "another device"
        )
    if system.errno in FORBIDDEN:
        return f"{system.strerror}: {system.filename}; change its permissions, or use root=..."
    return " ".join(str(error).split()) if isinstance(error, ValueError) else ""
