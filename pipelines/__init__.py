"""The commands. Importing this sets what the libraries below read when they are loaded."""

import os
import sys
import warnings

for _key, _value in {
    # Forked data workers and tokenizers' threads do not mix.
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that wait for one another give up the core sooner: beside a second busy process a
    # verification took 975 ms with OpenMP's default spinning and 143 ms with this; alone, the same.
    "GOMP_SPINCOUNT": "20000",
}.items():
    os.environ.setdefault(_key, _value)

# Of dependencies, about one another's next releases: nothing that a user can put right. Tests see
# them, and so do `python -W default` and PYTHONWARNINGS.
if not sys.warnoptions:
    for _category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", _category)
