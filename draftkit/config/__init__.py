"""Every setting, its type, default, bounds and meaning: one dataclass a section, no hydra here.

All of it is written once, in these files, and printed by `draftkit settings`; the YAML in `conf/`
holds choices. `pipelines` turn a composed configuration into a `Config`; everything below them sees
these objects only, and treats them as read-only (Hydra cannot fill a frozen dataclass).

Nothing else of ours is imported here: the choices are named in `choices.py`, and a test compares
the names with the dicts of the code that implements them. A value out of range raises ValueError
with the key as the user types it. The files of this package are seen through it.
"""

from draftkit.config.choices import *
from draftkit.config.experiment import *
from draftkit.config.measuring import *
from draftkit.config.service import *
from draftkit.config.text import *
from draftkit.config.training import *
