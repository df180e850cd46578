"""Every setting, its type, its default and its range: one dataclass a section, no hydra here.

A default is written once, in these files; the YAML under `conf/` holds choices. `pipelines` turn a
composed configuration into a `Config`; everything below them sees these objects only, and treats
them as read-only (Hydra cannot fill a frozen dataclass).

Nothing else of ours is imported here: the choices are named in `choices.py`, and a test compares
the names with the dicts of the code that implements them. A value out of range raises ValueError
with the key as the user types it.
"""

from draftkit.config.choices import (
    BENCHMARK_METHOD_NAMES,
    BENCHMARK_METHODS,
    CODE_NAMES,
    COMPILE_NAMES,
    DATA_NAMES,
    DEVICE_NAMES,
    DIVERGENCE_NAMES,
    DOMAIN_NAMES,
    DRAFT_ROLES,
    DRAFTED_NAMES,
    DTYPE_NAMES,
    ENGINE_NAMES,
    GPU_PARTS,
    GRANULARITY_NAMES,
    MIXTURE,
    ONLINE_TASKS,
    OTHER_NAMES,
    OVERLONG_NAMES,
    PROPOSER_NAMES,
    SCHEDULE_NAMES,
    SOURCE_NAMES,
    SUBJECT_NAMES,
    TEACHER_NAMES,
    TOKEN_NAMES,
    TRACKER_MODES,
    VERIFICATION_NAMES,
    WEIGHT_NAMES,
)
from draftkit.config.experiment import (
    Config,
    HardwareConfig,
    TrackerConfig,
    flatten,
)
from draftkit.config.measuring import (
    MIN_CHUNKS,
    BenchmarkConfig,
    DecodeConfig,
    EvaluateConfig,
    GpuConfig,
)
from draftkit.config.service import (
    DEFAULT_ROUTE,
    BufferConfig,
    DriftConfig,
    GateConfig,
    OnlineConfig,
    ServeConfig,
    TrafficConfig,
)
from draftkit.config.text import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    PretrainConfig,
    SamplingConfig,
    ShrinkConfig,
)
from draftkit.config.training import (
    DivergenceConfig,
    GenerateConfig,
    MixtureConfig,
    OptimConfig,
    SourceConfig,
)

__all__ = [
    "BENCHMARK_METHODS",
    "BENCHMARK_METHOD_NAMES",
    "CODE_NAMES",
    "COMPILE_NAMES",
    "DATA_NAMES",
    "DEFAULT_ROUTE",
    "DEVICE_NAMES",
    "DIVERGENCE_NAMES",
    "DOMAIN_NAMES",
    "DRAFTED_NAMES",
    "DRAFT_ROLES",
    "DTYPE_NAMES",
    "ENGINE_NAMES",
    "GPU_PARTS",
    "GRANULARITY_NAMES",
    "MIN_CHUNKS",
    "MIXTURE",
    "ONLINE_TASKS",
    "OTHER_NAMES",
    "OVERLONG_NAMES",
    "PROPOSER_NAMES",
    "SCHEDULE_NAMES",
    "SOURCE_NAMES",
    "SUBJECT_NAMES",
    "TEACHER_NAMES",
    "TOKEN_NAMES",
    "TRACKER_MODES",
    "VERIFICATION_NAMES",
    "WEIGHT_NAMES",
    "BenchmarkConfig",
    "BufferConfig",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "DivergenceConfig",
    "DriftConfig",
    "EvaluateConfig",
    "GateConfig",
    "GenerateConfig",
    "GpuConfig",
    "HardwareConfig",
    "LoraConfig",
    "MixtureConfig",
    "ModelConfig",
    "OnlineConfig",
    "OptimConfig",
    "PretrainConfig",
    "SamplingConfig",
    "ServeConfig",
    "ShrinkConfig",
    "SourceConfig",
    "TrackerConfig",
    "TrafficConfig",
    "flatten",
]
