"""What is written for the engines that people run."""

from dataclasses import dataclass

from draftkit.config.choices import DTYPE_NAMES, EXPORT_NAMES, GGUF_KINDS, Section, setting


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
