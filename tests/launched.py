"""Runs the code in its argument: `python -m tests.launched CODE`, as `python -c CODE` does."""

import sys

if __name__ == "__main__":
    exec(compile(sys.argv[1], "<launched>", "exec"), {"__name__": "__main__"})
