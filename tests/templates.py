"""Small tokenizers with chat templates of the kinds that released models have.

THINKING is Qwen3's without its tools (ChatML; reasoning is dropped from history), HEADERS Llama 3's
(a header for each turn, the date in a system turn, BOS written by the template itself).
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast as Fast

WORDS = "the draft proposes a few tokens and the target keeps those that it would have said "


def chat_ml(answer: str) -> str:
    """ChatML, with `answer` for the text of an assistant turn."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}" + answer + "{% else %}{{ message['content'] }}"
        "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


CHAT = chat_ml("{{ message['content'] }}<|im_end|>")
THINKING = r"""
{%- set ns = namespace(open=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" %}
        {%- set ns.open = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- else %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') }}
            {{- '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
HEADERS = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('there are\nno tools') }}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""


def byte_bpe(
    *,
    bos: bool = True,
    template: str | None = None,
    special: tuple[str, ...] = ("<s>", "<|im_end|>", "<|im_start|>"),
) -> Fast:
    """A byte-level BPE of 330 ids; `special`: what begins a text, what ends it, and others."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS, "end\n\n\nstart"] * 3, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    tokenizer = Fast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1], model_max_length=16
    )
    tokenizer.chat_template = template
    return tokenizer


def thinking() -> Fast:
    """A tokenizer as Qwen3's: nothing is put before a text."""
    return byte_bpe(bos=False, template=THINKING)


def headers() -> Fast:
    """A tokenizer as Llama 3's: BOS is put before a text."""
    special = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    return byte_bpe(template=HEADERS, special=special)


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


# Shapes of released templates, shortened: how each writes turns, reasoning, tools and calls.

QWEN = r"""
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer within <tool_call></tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
    {%- set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n') %}
            {%- set thought = thought.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
R1 = r"""
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ m.content }}
    {%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜>' }}
        {%- for call in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '\n' + call.function.arguments }}
        {%- endfor %}{{ '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
V31 = r"""
{%- if thinking is not defined %}{% set thinking = false %}{% endif %}
{%- for m in messages %}
    {%- if m.role in ('system', 'developer') %}{{ m.content }}
    {%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {%- set content = m.content or '' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>', 1)[1] %}
        {%- endif %}
        {{- '<｜Assistant｜></think>' + content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""
GLM = r"""[gMASK]
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
    {%- set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set thought, content = '', m.content or '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n') %}
            {%- set thought = thought.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|assistant|>\n<think>' + (thought.strip() if loop.index0 > ns.last else '') }}
        {{- '</think>' }}
        {%- if content.strip() %}{{ '\n' + content.strip() }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, one in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>' + (one if one is string else one | tojson) }}
            {%- endfor %}{{ '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content }}
    {%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
HARMONY = r"""
{%- macro front() %}{{ 'Today: ' + strftime_now('%Y-%m-%d') }}{% endmacro %}
{{- '<|start|>system<|message|>' + front() + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role in ('system', 'developer') %}
        {{- '<|start|>developer<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + m.name + '<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {%- if m.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name + '<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
MISTRAL = r"""{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls is defined %}{{ '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- set shown = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- shown | tojson + call.id }}
        {%- endfor %}{{ ']</s>' }}
    {%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""
LLAMA = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('single tool-calls alone') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {%- for key, one in call.arguments | items %}{{ key + '=' + one | tojson }}{% endfor %}
        {{- '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
PHI = r"""
{%- for m in messages %}
    {%- if m.role == 'system' and m.tools is defined and m.tools %}
        {{- '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}
    {%- else %}{{ '<|' + m.role + '|>' + (m.content or '') }}
        {%- if m.name is defined %}{{ '@' + m.name }}{% endif %}{{ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

THOUGHT = ("<think>", "</think>")
CALLED = (*THOUGHT, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEP = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
DEEP += ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", *THOUGHT)
# The template; its special tokens: what begins a text, what ends it, others; and its plain ones.
SHAPES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "qwen3": (QWEN, ("<s>", "<|im_end|>", "<|im_start|>"), CALLED),
    "r1": (R1, ("<s>", "<｜end▁of▁sentence｜>"), DEEP),
    "v3.1": (V31, ("<s>", "<｜end▁of▁sentence｜>"), DEEP),
    "glm4.5": (
        GLM,
        ("[gMASK]", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        CALLED,
    ),
    "gpt-oss": (
        HARMONY,
        ("<s>", "<|return|>", "<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>"),
        (),
    ),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), ()),
    "llama3.1": (
        LLAMA,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        (),
    ),
    "phi4-mini": (PHI, ("<s>", "<|end|>"), ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")),
}


def shaped(name: str) -> Fast:
    """A tokenizer of one of SHAPES."""
    template, special, plain = SHAPES[name]
    tokenizer = byte_bpe(bos=False, template=template, special=special)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in plain])
    return tokenizer
