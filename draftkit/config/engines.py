"""What is written for the engines that people run, and what is measured of them."""

from dataclasses import dataclass, field

from draftkit.config.choices import (
    DTYPE_NAMES,
    ENGINE_NAMES,
    EXPORT_NAMES,
    GGUF_KINDS,
    Section,
    setting,
)


@dataclass(kw_only=True)
class ExportConfig(Section, key="export"):
    """A drafter for other engines: a plain folder, files of their own, and how to start each."""

    # hf, the plain folder, is written in any case; vllm and sglang add a launch file to it.
    engines: list[str] = setting(EXPORT_NAMES[:3], names=EXPORT_NAMES, filled=True, unique=True)
    # Of the plain folder; null: as the drafter is stored. Engines load it in the target's.
    dtype: str | None = setting(None, names=DTYPE_NAMES)
    # llamacpp: the first of them is what is launched. f32 is what compares with other engines.
    gguf_types: list[str] = setting(["q8_0"], names=GGUF_KINDS, filled=True, unique=True)
    gguf_target: bool = True  # llamacpp: also the target, which it needs as a file like that
    # Evaluated beside evaluate.timing_batch_size, so that each gets its best gamma, where an
    # engine (vLLM) takes a table of them.
    batch_sizes: list[int] = setting([], least=1, unique=True)
    # onnx: an environment with onnxruntime-genai; null: .engines/onnx, as `make engines` makes it
    onnx_python: str | None = None
    push_to_hub: str | None = None  # ORG/NAME: the plain folder is also uploaded there
    onnx_precision: str = setting("fp32", names=("fp32", "fp16", "bf16", "int4"))


@dataclass(kw_only=True)
class EngineConfig(Section, key="engine"):
    """The engine whose own counts are held against our decoder, and on how much."""

    name: str = setting("transformers", names=ENGINE_NAMES)
    # Of vllm and llamacpp: servers that run already, with the drafter and without one. null: the
    # exported pair is started here, and listens on this machine only.
    url: str | None = None
    plain_url: str | None = None
    # The environment that has the engine; null: .engines/<name>, as `make engines` makes it, and
    # for transformers the one that runs this.
    environment: str | None = None
    arguments: list[str] = field(default_factory=list)  # added to the options of a server
    plugin: str | None = None  # vllm: the plugin that it loads (VLLM_PLUGINS); null: none
    drafts: list[str] | None = setting(None, names=("argmax", "sampled"), filled=True, unique=True)
    temperatures: list[float] = setting([0.0, 1.0], least=0, filled=True, unique=True)
    prompts: int = setting(40, least=2)
    max_new_tokens: int = setting(128, least=2)
    turns: int = setting(3, least=1)  # with and without the drafter, one after the other
    # Of weights and caches; auto: bfloat16 on CUDA, and float32 elsewhere, as GGUF and ONNX are.
    dtype: str = setting("auto", names=("auto", *DTYPE_NAMES))

    def __post_init__(self) -> None:
        super().__post_init__()
        served = self.name in ("vllm", "llamacpp")
        self.require(self.url is None or served, "url", "be that of vllm or llamacpp")
        both = self.plain_url is None or self.url is not None
        self.require(both, "plain_url", "stand beside engine.url")
        one = self.url is None or (self.drafts is not None and len(self.drafts) == 1)
        self.require(one, "drafts", "name the one way in which the server of engine.url drafts")
        plugs = self.plugin is None or self.name == "vllm"
        self.require(plugs, "plugin", "be null but for engine=vllm")
