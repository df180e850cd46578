"""`benchmark.subject=gpu`: all that needs a GPU, measured by one command in nine minutes.

`run` is the command: it starts each part in a process of its own (`processes`) and writes the
report (`report`). `part` is such a process; the other modules are what the parts do.
"""
