"""Every setting, its type, its default and its range: one dataclass a section, no hydra here.

A default is written once, in these files; the YAML under `conf/` holds choices. `pipelines` turn a
composed configuration into a `Config`; everything below them sees these objects only, and treats
them as read-only (Hydra cannot fill a frozen dataclass).

Nothing else of ours is imported here: the choices are named in `choices.py`, and a test compares
the names with the dicts of the code that implements them. A value out of range raises ValueError
with the key as the user types it.
"""

from draftkit.config.choices import (
    COUNTING_NAMES,
    DIVERGENCE_NAMES,
    DRAFTED_NAMES,
    MIXTURE,
    NEVER,
    PROPOSER_NAMES,
    REFUSE,
    SAMPLING_FROM_NAMES,
    SOURCE_NAMES,
    VERIFICATION_NAMES,
)
from draftkit.config.experiment import (
    MAPPINGS,
    SERVERS,
    Config,
    HardwareConfig,
    flatten,
    with_sections,
)
from draftkit.config.measuring import (
    DecodeConfig,
    EvaluateConfig,
)
from draftkit.config.service import (
    DEFAULT_ROUTE,
    BufferConfig,
    GateConfig,
    OnlineConfig,
    ServeConfig,
)
from draftkit.config.text import (
    DataConfig,
    DraftConfig,
    HeadConfig,
    LoraConfig,
    ModelConfig,
    PretrainConfig,
    SamplingConfig,
    TargetConfig,
)
from draftkit.config.training import (
    DivergenceConfig,
    GenerateConfig,
    OptimConfig,
    SourceConfig,
    has_compiler,
)
