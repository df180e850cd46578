"""Prompts as a caller of the library has them: text, chats, ids or rows of data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from draftkit.config import Config, DataConfig
from draftkit.data.corpora import read_document
from draftkit.data.lengths import Room, lengths_within, reading_notes
from draftkit.data.prompts import Example, RowReader, begun
from draftkit.data.rows import name_of
from draftkit.models.loading import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def examples_of(
    prompts: Sequence[Prompt],
    target: Target,
    data: DataConfig,
    *,
    context: int,
    note: Callable[[str], None] = lambda line: None,
) -> list[Example]:
    """Prompts, and answers where they have some, as the target reads them, nothing cut.

    Text is a user turn where `data.chat_template` says so; every answer of a chat is an example.
    Rows of the same question are one document, named after the first of them. Rows that cannot be
    used are left out, as `data.max_bad_rows` allows.
    context: that of the models. `note` hears what was made of texts. Raises ValueError naming the
    first prompt that cannot be used.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, and is one {type(prompts).__name__}")
    size, window = target.adapter.vocab_size, lengths_within(context, data).window
    data = replace(data, name="local", path="prompts", max_length=window)
    start = target.adapter.start_id
    reader = RowReader(target.tokenizer, data, start=start)
    rows = {f"prompt {n}": row for n, one in enumerate(prompts) if (row := row_of(one)) is not None}
    documents = (read_document(row, data, name, "") for name, row in rows.items())
    read = {document.origin: (document.id, made) for document, made in reader.read(documents)}
    first: dict[str, str] = {}  # what the first prompt with an id is called
    examples: list[Example] = []
    for number, prompt in enumerate(prompts):
        name = f"prompt {number}"
        if name in rows:
            if name not in read:
                continue
            id, made = read[name]
            called = first.setdefault(id, name)
            made = [replace(example, document=called) for example in made]
        else:
            ids = begun(_ids_of(prompt, size, name), start)
            called = first.setdefault(name_of(ids), name)
            made = [Example(ids, [False] * len(ids), called, "")] if ids else []
        if not made:
            raise ValueError(f"{name} holds no text to continue")
        if (longest := max(len(example.prompt_ids) for example in made)) >= context:
            raise ValueError(
                f"{name} has {longest} tokens, and the models' context is {context}: shorten it"
            )
        examples += made
    for line in reading_notes(reader.counts, reader.bad.lines):
        note(line)
    return examples


def row_of(prompt: Prompt) -> dict[str, Any] | None:
    """A prompt as a row of data; None for what is no text and no chat."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    is_chat = isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
    return {"messages": [*prompt]} if is_chat else None


def _ids_of(prompt: Any, size: int, name: str) -> list[int]:
    """Token ids, also those of NumPy and torch. Raises ValueError for what is none below `size`."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray):
        whole = [int(one) for one in ids if isinstance(one, Integral) and not isinstance(one, bool)]
        if len(whole) == len(ids) and all(0 <= one < size for one in whole):
            return whole
    raise ValueError(f"{name} must be text, messages, or ids from 0 to {size - 1}")


def fit_examples(
    examples: Sequence[Example], data: DataConfig, *, context: int, max_length: int | None
) -> tuple[list[Example], Room]:
    """`examples` with their answers cut, and the room of sampled ones.

    max_length: tokens of prompt and answer together, instead of the lengths of `data`. Raises
    ValueError for a prompt that leaves no room.
    """
    lengths = lengths_within(context, data)
    most, room = lengths.prompt, Room(lengths.completion, lengths.prompt + lengths.completion)
    limit = f"data.max_prompt_tokens={most}"
    if max_length is not None:
        most, room = max_length - 1, Room(max_length, max_length)
        limit = f"prompt and answer together get max_length={max_length}"
    fitted = []
    for example in examples:
        prompt = len(example.prompt_ids)
        if prompt > most:
            raise ValueError(
                f"{example.document} has {prompt} tokens, and {limit}: raise it, or leave the "
                "prompt out"
            )
        end = min(prompt + room.new, room.total)
        fitted.append(
            replace(example, token_ids=example.token_ids[:end], loss_mask=example.loss_mask[:end])
        )
    return fitted, room


def held_out_of(
    examples: Sequence[Example], config: Config
) -> tuple[Sequence[Example], Sequence[Example]]:
    """`examples` to train on, and the last of them, to choose the weights.

    No prompt of the caller is in both: what one chat says later repeats what it said before. Raises
    ValueError where that leaves nothing to train on.
    """
    count = max(2, round(config.data.validation_fraction * len(examples)))
    count = min(count, config.evaluate.validation_prompts)
    whole = {example.document for example in examples[-count:]}
    training = [example for example in examples if example.document not in whole]
    if not training:
        raise ValueError(
            f"prompts: {len(examples)} are too few, since {count} choose the weights, and a chat "
            "is not split: give more, or some as validation"
        )
    return training, examples[-count:]


def check_held_out(held_out: Sequence[Example], trained: Sequence[Example]) -> None:
    """Raise ValueError for no prompt that chooses the weights, or one that is trained on."""
    prompts = {tuple(example.prompt_ids) for example in trained}
    both = sum(tuple(example.prompt_ids) in prompts for example in held_out)
    if not held_out:
        raise ValueError("validation holds no prompt: give some, or leave it out")
    if both:
        raise ValueError(
            f"validation: {both} of its {len(held_out)} prompts are trained on as well: give others"
        )
