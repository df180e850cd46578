"""`benchmark.subject=gpu`: all that needs a GPU, measured by one command in nine minutes.

`run` is the command: it starts each part in a process of its own and writes the report (`report`).
`part` is such a process; the other modules, and `ceilings` beside this folder, are what parts do.
"""
