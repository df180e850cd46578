"""What engines have code for: copied from their sources, of the versions that `engines` names.

Of the architectures that transformers loads as causal language models; encoder-decoder models and
those of several modalities are left out.
"""

# vllm/model_executor/models/registry.py: `_TEXT_GENERATION_MODELS`
_VLLM = """
AXK1 Afmoe Apertus Bloom Cohere2 Cohere2Moe Cohere Dbrx DeepseekV2 DeepseekV32 DeepseekV3
DeepseekV4 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba GPT2LMHeadModel
GPTJ Gemma2 Gemma3 Gemma3n Gemma4 Gemma Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite
GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText
HyperCLOVAX Inkling Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama4 Llama LongcatFlash Mamba2 Mamba
MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Mistral Mixtral Nemotron NemotronH OPT OlmoHybrid
Olmoe Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp StableLm Zamba2
"""

# sglang/srt/models/*.py: `EntryClass`
_SGLANG = """
Afmoe Apertus Arcee Beam Cohere2 Cohere2Moe Cohere Dbrx DeepseekV2 DeepseekV32 DeepseekV3
DeepseekV4 Dots3Note Ernie4_5_Moe Exaone4 ExaoneMoe FalconH1 FalconMamba GPT2LMHeadModel
GPTBigCode GPTJ Gemma2 Gemma3 Gemma3n Gemma4Assistant Gemma4 Gemma4UnifiedAssistant Gemma Glm4
Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA
GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1 KimiLinear Laguna Lfm2
Lfm2Moe Llama4 Llama LongcatFlash Mamba2 Mamba Mellum MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3
Mistral Mixtral NemotronH OPT Olmo2 Olmo Olmoe Persimmon Phi3 Phi Qwen2 Qwen2Moe Qwen3 Qwen3Moe
Qwen3Next Qwen3_5 Qwen3_5Moe StableLm Starcoder2 Zaya
"""

# conversion/*.py: `ModelBase.register`
_LLAMACPP = """
Afmoe Apertus Arcee Bamba BitNet Bloom Cohere2 Cohere2Moe Cohere Dbrx DeepseekV2 DeepseekV32
DeepseekV3 DeepseekV4 Dots1 Dots3Note Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1
FalconMamba GPT2LMHeadModel GPTBigCode GPTNeoX Gemma2 Gemma3 Gemma3n Gemma4Assistant Gemma4
Gemma4UnifiedAssistant Gemma Glm4 Glm4Moe Glm4MoeLite Glm GlmMoeDsa GptOss Granite GraniteMoe
GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText HunYuanDenseV1
HunYuanMoEV1 Jais2 Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama4 Llama Mamba2 Mamba Mellum
MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Mistral Mixtral Nemotron NemotronH Olmo2 Olmo3 Olmo
Olmoe Phi3 Phi Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss
SmolLM3 SolarOpen StableLm Starcoder2 Youtu
"""

# onnxruntime_genai/models/builder.py: `create_model`
_ONNX = """
Ernie4_5 Gemma2 Gemma3 Gemma GptOss Granite GraniteMoeHybrid HunYuanDenseV1 Lfm2 Lfm2Moe Llama
Mistral Nemotron Olmo Phi3 Phi Qwen2 Qwen3 SmolLM3
"""

# mlx_lm/models/*.py: a module for each `model_type`
_MLX = """
Afmoe Apertus BailingHybrid BitNet Cohere2 Cohere Dbrx DeepseekV2 DeepseekV32 DeepseekV3 Dots1
Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe FalconH1 FalconMamba GPT2LMHeadModel GPTBigCode GPTJ
GPTNeoX Gemma2 Gemma3 Gemma4 Gemma Glm4 Glm4Moe Glm4MoeLite Glm GlmMoeDsa GptOss Granite
GraniteMoe GraniteMoeHybrid Helium HunYuanDenseV1 Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama4
Llama LongcatFlash Mamba2 Mamba Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 Ministral3 Mistral
Mixtral NanoChat Nemotron NemotronH Olmo2 Olmo3 Olmo OlmoHybrid Olmoe Phi3 Phi Phimoe Qwen2
Qwen2Moe Qwen3 Qwen3Moe Qwen3Next RecurrentGemma SeedOss SmolLM3 SolarOpen StableLm Starcoder2
"""


def _names(text: str) -> frozenset[str]:
    """Architectures as `config.json` names them; the ending of most is left out in the lists."""
    return frozenset(
        name if name.endswith("Model") else f"{name}ForCausalLM" for name in text.split()
    )


_VLLM_NAMES = _names(_VLLM)
ARCHITECTURES = {
    "vllm": _VLLM_NAMES,
    "vllm_cpu": _VLLM_NAMES,
    "sglang": _names(_SGLANG),
    "llamacpp": _names(_LLAMACPP),
    "onnx": _names(_ONNX),
    "mlx": _names(_MLX),
}

# conversion/base.py, `get_vocab_base_pre`: how it tells pre-tokenizers apart. A text is encoded,
# and the sha256 of its ids (here the first digits) looked up.
PRE_TOKENIZER_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫\ufe0f (mult"
    "iple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3"
    "..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български '"
    "'''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure?"
    " 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
_PRE_TOKENIZERS = """
049ecf76 0876d13b 0a766d03 0e9433cb 0ef9807a 0fe1cf6e 1431a23e 1444df51 16389f0a 169bf029
171aeeed 1994ffd0 2085e163 27949a24 32d85c31 347715f5 35d91631 36f3066e 3c30d3ad 3ce83efd
3eda48b4 48f8e02c 49fc0303 4a2e2aba 4e2b24cc 52df12b4 53e32597 60476e12 60824e3c 6221ad28
62f6fb0a 63b97e42 65366022 66b8d4e1 6c81ce32 789696f5 7967bfa4 7b3e7548 7dec8608 7e57df22
7fc505bd 81212dc7 81d72c73 846deafc 85505942 862f8277 877081d1 8aeee386 8b5a93ed 8e622958
96a5f08b 972da7b5 9b1be57e 9c2227e4 9ca2dd61 9d032fcb 9d70134b 9dcf830e 9e454714 a023e9fd
a0b64b43 a1336059 a1e163ec a6b57017 a8594e3e ad851be1 b0a6b1c0 b3d1dd86 b3f499bb b4b8ca1f
b53802fb b6dc8df9 b6e8e151 bba3b336 bc01ce58 bc5108ee c136ed14 c7699093 c7ea5862 ccc2ef01
cdf5f353 d30d75d9 d353350c d4540891 d4c8f286 d5f1dd6f d772b220 e4d54df1 e636dc30 e6ddf9c6
f2410721 f4f37b6c f6791d19 f728162c fcace8b9
"""
PRE_TOKENIZERS = frozenset(_PRE_TOKENIZERS.split())
