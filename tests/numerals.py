"""`python -m tests.numerals FOLDER`: numbers and their words, and an untrained T5 that reads them.

A parallel text as small as translation gets: FOLDER has `rows.jsonl`, and in `model` a tokenizer
with a model of the least size. The experiment `t5` and docs/results/t5.md begin with it.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
)

from draftkit.models.loading import save_model

UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ("", " thousand", " million", " billion")
ROWS, VOCABULARY = 6000, 256
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def spoken(number: int) -> str:
    """`number`, below 10^12, in English words."""
    if number < 20:
        return UNITS[number]
    parts = []
    for power, scale in reversed([*enumerate(SCALES)]):
        group = number // 1000**power % 1000
        hundreds, rest = divmod(group, 100)
        words = [UNITS[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words += [TENS[rest // 10 - 2], *([UNITS[rest % 10]] if rest % 10 else [])]
        elif rest:
            words.append(UNITS[rest])
        parts += [" ".join(words) + scale] if words else []
    return " ".join(parts)


def pairs(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Rows of a number, written in one of three ways, and its words."""
    draw = random.Random(seed)
    for _ in range(count):
        number = draw.randrange(10 ** draw.randint(6, 12))
        shown = draw.choice([f"{number}", f"{number:,}", " ".join(str(number))])
        yield {"prompt": f"say {shown}", "completion": spoken(number)}


def pieces(texts: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer as SentencePiece makes them: pieces with spaces, an end behind every text."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )


def write_seed(folder: Path, *, count: int = ROWS, vocab_size: int = VOCABULARY) -> None:
    """Write `rows.jsonl`, and in `model` the tokenizer with an untrained T5 of the least size."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [*pairs(count)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = pieces([text for row in rows for text in row.values()], vocab_size)
    shape = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    shape.pad_token_id, shape.eos_token_id = 0, 1
    shape.decoder_start_token_id = 0  # pyrefly: ignore[missing-attribute]
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(shape)
    save_model(model, tokenizer, folder / "model")


if __name__ == "__main__":
    write_seed(Path(sys.argv[1]))
