"""Small tokenizers with chat templates of the two kinds that released models have.

THINKING is Qwen3's without its tools (ChatML; reasoning is dropped from history), HEADERS Llama 3's
(a header for each turn, the date in a system turn, BOS written by the template itself).
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
