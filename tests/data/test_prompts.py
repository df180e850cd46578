"""From rows to token ids: what is prompt, what carries loss, what is cut, counted or refused."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast as Fast

from draftkit.config import DataConfig
from draftkit.data.corpora import REASONS, Document, read_document, read_documents
from draftkit.data.lengths import Room, reading_notes, shares_cut
from draftkit.data.prompts import TOGETHER, Example, RowReader
from draftkit.data.splits import SPLITS, Splits, make_splits
from tests.templates import CHAT, WORDS, byte_bpe, chat, chat_ml, headers, thinking


@pytest.fixture(scope="module")
def tokenizer() -> Fast:
    return byte_bpe()


def settings(**options: Any) -> DataConfig:
    small = {"prompt_tokens": 8, "max_length": 128}
    return DataConfig(**{"name": "local", "path": "a.jsonl"} | small | options)


def examples_of(row: dict[str, Any], tokenizer: Fast, **options: Any) -> list[Example]:
    ((_, made),) = RowReader(tokenizer, settings(**options)).read([Document("id", "domain", row)])
    return made


def splits_of(folder: Path, rows: Sequence[object], tokenizer: Fast, **options: Any) -> Splits:
    """The splits of `rows`, in memory, to be compared."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = settings(path=str(path), **options)
    splits = make_splits(read_documents(data), data, tokenizer, folder, context=4096)
    lists: dict[str, Any] = {name: list(getattr(splits, name)) for name in SPLITS}
    return replace(splits, **lists)


def endless() -> Fast:
    tokenizer = byte_bpe()
    tokenizer.eos_token = None
    return tokenizer


def repr_without_id(example: Example) -> str:
    return f"{example.token_ids} {example.loss_mask}"


def numbers(first: int) -> str:
    """Some 1,400 tokens, no eight of which stand in the text of another `first`."""
    return " ".join(str((first + 11) * 10_000 + n) for n in range(200))


def learned(example: Example, tokenizer: Fast) -> str:
    marked = zip(example.token_ids, example.loss_mask, strict=True)
    return str(tokenizer.decode([token for token, loss in marked if loss]))


# Prompt and completion


def test_prompt_and_completion_are_tokenised_apart_and_end_with_eos(tokenizer: Fast) -> None:
    (example,) = examples_of({"prompt": "the dra", "completion": "ft keeps"}, tokenizer)
    prompt = tokenizer("the dra")["input_ids"]
    completion = tokenizer("ft keeps", add_special_tokens=False)["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    assert example.prompt_ids == prompt
    assert example.token_ids == [*prompt, *completion, tokenizer.eos_token_id]
    assert example.loss_mask == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert example.has_completion
    (empty,) = examples_of({"prompt": "the", "completion": ""}, tokenizer)
    assert empty.token_ids == [*empty.prompt_ids, tokenizer.eos_token_id]
    assert (example.document, example.domain) == ("id", "domain")


def test_a_prompt_alone_has_no_completion(tokenizer: Fast) -> None:
    (example,) = examples_of({"prompt": "the draft"}, tokenizer)
    assert not example.has_completion
    assert example.prompt_ids == example.token_ids == tokenizer("the draft")["input_ids"]
    assert example.loss_mask == [False] * len(example.token_ids)
    assert examples_of({"prompt": "the draft"}, endless())  # which needs no end


def test_a_long_prompt_keeps_its_end_and_is_counted(tmp_path: Path, tokenizer: Fast) -> None:
    rows = [{"prompt": f"{n} the draft", "completion": WORDS} for n in range(39)]
    rows.append({"prompt": WORDS * 40, "completion": WORDS})
    splits = splits_of(tmp_path, rows, tokenizer, max_prompt_tokens=50)
    examples = [*splits.train, *splits.validation, *splits.test]
    (cut,) = [example for example in examples if len(example.prompt_ids) == 50]
    assert splits.counts["prompts_cut"] == 1
    assert cut.prompt_ids == [tokenizer.bos_token_id, *tokenizer(WORDS * 40)["input_ids"][-49:]]
    assert cut.token_ids[-1] == tokenizer.eos_token_id
    assert splits.room == Room(1024, 50 + 1024)


def test_a_long_completion_loses_its_end_and_is_counted(tmp_path: Path, tokenizer: Fast) -> None:
    rows = [{"prompt": f"{n}", "completion": "the " * n} for n in (1, 46, 47, 60)]
    splits = splits_of(tmp_path, rows, tokenizer, max_completion_tokens=48)
    examples = [*splits.train, *splits.validation, *splits.test]
    whole = [e for e in examples if e.token_ids[-1] == tokenizer.eos_token_id]
    assert max(sum(example.loss_mask) for example in examples) == 48
    assert splits.counts["completions_cut"] == 4 - len(whole)
    assert 1 <= len(whole) <= 3


def test_rows_without_a_token_are_dropped_and_counted(tmp_path: Path) -> None:
    plain = byte_bpe(bos=False)
    rows = [{"prompt": f"row {n}", "completion": "x"} for n in range(30)]
    rows.append({"prompt": "", "completion": "x"})
    splits = splits_of(tmp_path, rows, plain)
    assert splits.counts["documents"] == 31
    assert splits.counts["documents_dropped"] == 1
    assert sum(splits.counts[name] for name in ("train", "validation", "test")) == 30


# Text

# Of windows of 32 tokens of which 8 are context, the first of them BOS: shorter than one, full, one
# more, with a rest that is just too short to keep or just long enough, and the same later on.
BOUNDARIES = (17, 31, 32, 33, 45, 46, 47, 62, 63, 64, 76, 77, 78, 93, 94, 95, 97)


@pytest.mark.parametrize("length", BOUNDARIES)
def test_windows_of_a_text_join_to_the_text_and_its_end(tokenizer: Fast, length: int) -> None:
    ids = tokenizer(WORDS * 10)["input_ids"][:length]
    text = str(tokenizer.decode(ids[1:]))
    assert tokenizer(text)["input_ids"] == ids  # the words are chosen so that this holds
    examples = examples_of({"text": text}, tokenizer, max_length=32)
    for example in examples:  # as a server reads every prompt
        assert example.token_ids[0] == tokenizer.bos_token_id
        assert example.loss_mask == [False] * 8 + [True] * (len(example.token_ids) - 8)
    joined = [token for example in examples for token in example.token_ids[1:]]
    rest = (length - 1) % 31
    if rest == 0:  # no room for EOS
        assert joined == ids[1:]
    elif length > 32 and rest + 2 < 16:  # too short to keep
        assert joined == ids[1 : length - rest]
    else:
        assert joined == [*ids[1:], tokenizer.eos_token_id]


def test_without_a_token_that_begins_texts_windows_are_the_text_alone() -> None:
    plain = byte_bpe(bos=False)
    examples = examples_of({"text": WORDS * 9}, plain, max_length=32)
    joined = [token for example in examples for token in example.token_ids]
    assert joined[:-1] == plain(WORDS * 9)["input_ids"][: len(joined) - 1]


@pytest.mark.parametrize(("length", "kept"), [(1, False), (7, False), (8, True), (9, True)])
def test_a_short_text_stays_if_one_token_follows_its_prompt(
    tokenizer: Fast, length: int, kept: bool
) -> None:
    text = str(tokenizer.decode(tokenizer(WORDS)["input_ids"][1:length]))
    examples = examples_of({"text": text}, tokenizer)
    assert [len(example.token_ids) for example in examples] == ([length + 1] if kept else [])


def test_a_full_window_stays_however_short_windows_are(tokenizer: Fast) -> None:
    text = str(tokenizer.decode(tokenizer(WORDS * 5)["input_ids"][1:30]))
    examples = examples_of({"text": text}, tokenizer, max_length=10)
    assert [len(example.token_ids) for example in examples] == [10, 10, 10]


def test_an_end_that_the_tokenizer_writes_itself_is_not_doubled() -> None:
    ending = byte_bpe(bos=False)
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 1)]
    )
    (example,) = examples_of({"text": WORDS}, ending)
    assert example.token_ids.count(1) == 1
    assert example.token_ids[-1] == 1


def test_special_tokens_in_the_corpus_are_words_and_in_a_file_they_are_control(
    tokenizer: Fast,
) -> None:
    row = {"text": f"eos = '<|im_end|>'  # {WORDS}"}
    document = Document("python:a.py", "python", row)
    corpus = DataConfig(prompt_tokens=8)
    ((_, (literal,)),) = RowReader(tokenizer, corpus).read([document])
    (control,) = examples_of(row, tokenizer)
    assert literal.token_ids.count(1) == 1  # the end of the text
    assert control.token_ids.count(1) == 2
    assert tokenizer.decode(literal.token_ids[1:-1]) == row["text"]
    assert 1 in tokenizer("a <|im_end|>")["input_ids"]  # nothing stays switched


# Chats


def test_a_prompt_is_a_user_turn_where_there_is_a_template() -> None:
    tokenizer = thinking()
    row = {"prompt": "the draft", "completion": "keeps"}
    options: dict[str, Any] = {"template_options": {"enable_thinking": False}, "system": "Short."}
    (example,) = examples_of(row, tokenizer, **options)
    front = {"role": "system", "content": "Short."}
    context = tokenizer.apply_chat_template(
        [front, *chat("the draft")], add_generation_prompt=True, enable_thinking=False
    )
    assert example.prompt_ids == context["input_ids"]
    assert learned(example, tokenizer) == "keeps<|im_end|>"
    (alone,) = examples_of({"prompt": "the draft"}, tokenizer, **options)
    assert alone.token_ids == example.prompt_ids
    assert not alone.has_completion
    (never,) = examples_of(row, tokenizer, chat_template="never")
    assert tokenizer.decode(never.token_ids) == "the draftkeeps<|im_end|>"
    (text,) = examples_of({"text": WORDS}, tokenizer)  # plain, whatever the template
    assert tokenizer.decode(text.token_ids) == f"{WORDS}<|im_end|>"


@pytest.mark.parametrize("make", [thinking, headers])
def test_prompts_and_answers_that_name_special_tokens_are_text_and_are_counted(
    tmp_path: Path, make: Callable[[], Fast]
) -> None:
    tokenizer = make()
    end = tokenizer.eos_token
    row = {"prompt": f"what is {end}?", "completion": f"{end} ends a turn"}
    (example,) = examples_of(row, tokenizer)
    assert learned(example, tokenizer).endswith(f"{end[0]}\u200b{end[1:]} ends a turn{end}")
    others = [{"prompt": f"{n}", "completion": "b"} for n in range(4)]
    splits = splits_of(tmp_path, [row, *others], tokenizer)
    assert (splits.counts["rows_naming_special"], splits.counts["prompts_templated"]) == (1, 5)
    base = byte_bpe()
    (untemplated,) = examples_of(row, base)
    assert untemplated.token_ids.count(base.eos_token_id) == 1


@pytest.mark.parametrize("make", [thinking, headers])
def test_who_applies_the_template_says_never(make: Callable[[], Fast]) -> None:
    tokenizer = make()
    end = tokenizer.eos_token
    formatted = {
        "prompt": tokenizer.apply_chat_template(
            chat("say 0"), tokenize=False, add_generation_prompt=True
        ),
        "completion": f"yes{end}",  # which ends it once
    }
    (example,) = examples_of(formatted, tokenizer, chat_template="never")
    ids = tokenizer.apply_chat_template(chat("say 0"), add_generation_prompt=True)["input_ids"]
    assert example.prompt_ids == ids
    assert learned(example, tokenizer) == f"yes{end}"


def test_tools_reach_the_template() -> None:
    tool = {"name": "add<|im_end|>"}
    turns = {"messages": chat("2+2?", "4"), "tools": [tool]}
    calling = byte_bpe(template="{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHAT)
    (example,) = examples_of(turns, calling)
    assert str(calling.decode(example.prompt_ids)).startswith(
        '{"name": "add<\u200b|im_end|>"}<|im_start'
    )
    assert example.prompt_ids.count(calling.eos_token_id) == 1


def test_a_chat_that_awaits_an_answer_is_a_prompt_besides_its_answers() -> None:
    tokenizer = byte_bpe(template=CHAT)
    first, last = examples_of({"messages": chat("hi", "yes", "and?")}, tokenizer)
    assert learned(first, tokenizer) == "yes<|im_end|>"
    assert not last.has_completion
    assert str(tokenizer.decode(last.prompt_ids)).endswith(
        "yes<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_an_assistant_says_before_any_user_is_no_answer() -> None:
    tokenizer = byte_bpe(template=CHAT)
    greeting = {"role": "assistant", "content": "hello"}
    (example,) = examples_of({"messages": [greeting, *chat("hi", "yes")]}, tokenizer)
    assert learned(example, tokenizer) == "yes<|im_end|>"
    assert examples_of({"messages": [greeting]}, tokenizer) == []


def test_turns_between_answers_are_context() -> None:
    tokenizer = byte_bpe(template=CHAT)
    tool = {"role": "tool", "content": "4"}
    call, final = chat("2+2?", "look", "", "four")[1::2]
    examples = examples_of({"messages": [*chat("2+2?"), call, tool, final]}, tokenizer)
    assert [learned(one, tokenizer) for one in examples] == ["look<|im_end|>", "four<|im_end|>"]
    assert "tool\n4<|im_end|>" in str(tokenizer.decode(examples[1].prompt_ids))


def test_an_answer_that_is_not_written_after_its_prompt_is_counted_and_stays_a_prompt(
    tmp_path: Path,
) -> None:
    turns = "<think>\nhm\n</think>\n\nyes"
    rows = [{"messages": chat(f"{n}?", turns)} for n in range(5)]
    off = {"enable_thinking": False}
    splits = splits_of(tmp_path, rows, thinking(), template_options=off)
    assert splits.counts["answers_unused"] == 5
    assert not any(example.has_completion for example in splits.train)


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
PRINTED = chat_ml("{{ message.content }}{{ message.tool_calls or [] }}<|im_end|>")


@pytest.mark.parametrize(
    ("template", "says", "key"),
    [
        (CHAT, CALLED, "answers_unused"),
        (CHAT, CALLED | {"content": "look"}, "answers_unused"),
        (CHAT, {"role": "assistant", "content": "4", "weight": 0}, "answers_weightless"),
        (PRINTED, CALLED, ""),
        (PRINTED, CALLED | {"content": "look"}, ""),
        (CHAT, {"role": "assistant", "content": "4", "weight": 1}, ""),
    ],
    ids=["call", "call and text", "weight 0", "printed", "printed with text", "weight 1"],
)
def test_answers_without_their_calls_or_of_no_weight_are_prompts_alone_and_counted(
    tmp_path: Path, template: str, says: dict[str, Any], key: str
) -> None:
    tool = {"role": "tool", "content": "4"}
    last = {"role": "assistant", "content": "four"}
    rows = [{"messages": [*chat(f"{n}?"), says, tool, last]} for n in range(9)]
    tokenizer = byte_bpe(template=template)
    splits = splits_of(tmp_path, rows, tokenizer)
    counts = splits.counts
    names = ("answers_unused", "answers_weightless")
    found = {name: counts[name] for name in names if counts.get(name)}
    assert found == ({key: 9} if key else {})
    assert (counts["rows"], counts["completions"]) == (18, 9 if key else 18)
    examples = [*splits.train, *splits.validation, *splits.test]
    assert sum(example.has_completion for example in examples) == counts["completions"]


@pytest.mark.parametrize(("options", "share"), [({}, 8), ({"enable_thinking": False}, 0)])
def test_answers_that_begin_with_an_empty_reasoning_are_counted(
    tmp_path: Path, options: dict[str, Any], share: int
) -> None:
    rows = [
        {"messages": chat(f"{n}?", "yes" if n else "<think>\nhm\n</think>\n\nyes")}
        for n in range(9)
    ]
    counts = splits_of(tmp_path, rows, thinking(), template_options=options).counts
    assert counts.get("answers_empty_reasoning") == share
    lines = [line for line in reading_notes(counts) if "empty reasoning" in line]
    assert [line.split(",")[:2] for line in lines] == [["8 answers", " 89% of all"]] * bool(share)


def test_a_chat_loses_its_oldest_turns_and_is_dropped_where_the_last_is_too_long(
    tmp_path: Path,
) -> None:
    tokenizer, system = headers(), {"role": "system", "content": "be brief"}
    long = [system, *chat("of " * 30, "yes", "and b?", "no " * 9)]
    rows = [chat(f"say {n}", "so") for n in range(60)] + [long, chat("x7 " * 300, "yes")]
    date = {"date_string": "1 May"}

    def prompt(*turns: dict[str, str]) -> Any:
        return tokenizer.apply_chat_template([*turns], add_generation_prompt=True, **date)

    whole, kept = prompt(*long[:-1])["input_ids"], prompt(system, long[-2])["input_ids"]
    splits = splits_of(
        tmp_path,
        [{"messages": turns} for turns in rows],
        tokenizer,
        template_options=date,
        max_prompt_tokens=len(whole) - 1,
        max_completion_tokens=50,
    )
    # The first turn alone fits, being shorter than both with the answer between them.
    assert (splits.counts["prompts_cut"], splits.counts["rows_dropped"]) == (1, 1)
    examples = [*splits.train, *splits.validation, *splits.test]
    assert len(examples) == 62
    (shortened,) = [one for one in examples if one.prompt_ids == kept]
    answer = tokenizer.decode(shortened.token_ids[len(shortened.prompt_ids) :])
    assert answer.startswith("no no")
    assert answer.endswith(tokenizer.eos_token)


# Splits


def test_every_document_gives_one_example_before_any_gives_a_second(
    tmp_path: Path, tokenizer: Fast
) -> None:
    """Several answers to a prompt are one document, and so are the windows of a text."""
    rows: list[dict[str, str]] = [
        {"prompt": f"question {number}", "completion": f"answer {answer}"}
        for number in range(30)
        for answer in range(8)
    ]
    rows += [{"text": f"{number} {WORDS * 40}"} for number in range(10)]
    splits = splits_of(tmp_path, rows, tokenizer, test_fraction=0.4)
    for part in (splits.train, splits.validation, splits.test):
        names = [example.document for example in part]
        assert len(set(names[: len(set(names))])) == len(set(names))
        rank = [names[:place].count(name) for place, name in enumerate(names)]
        assert rank == sorted(rank)
    assert splits_of(tmp_path, rows[::-1], tokenizer, test_fraction=0.4) == splits


def test_documents_tokenised_together_and_alone_agree(tmp_path: Path, tokenizer: Fast) -> None:
    rows = [
        {"text": WORDS * 3},
        {"prompt": "the", "completion": "target"},
        {"prompt": "a draft"},
        {"text": WORDS * 50},
    ]
    splits = splits_of(tmp_path, rows, tokenizer)
    together = [*splits.train, *splits.validation, *splits.test]
    alone = [example for row in rows for example in examples_of(row, tokenizer)]
    assert sorted(map(repr_without_id, together)) == sorted(map(repr_without_id, alone))


def test_the_checksum_sees_tokens_and_masks(tmp_path: Path, tokenizer: Fast) -> None:
    # The ninth token is a space, which tells no two prompts apart: the order stays.
    rows = [{"text": f"{n:07}  {WORDS}"} for n in range(10)]
    plain = splits_of(tmp_path, rows, tokenizer)
    masks = splits_of(tmp_path, rows, tokenizer, prompt_tokens=9)
    assert [e.token_ids for e in masks.train] == [e.token_ids for e in plain.train]
    tokens = splits_of(tmp_path, [*rows[:-1], {"text": f"{9:07}  {WORDS}!"}], tokenizer)
    assert [one.document for one in tokens.train] == [one.document for one in plain.train]
    assert len({plain.sha256, masks.sha256, tokens.sha256}) == 3


def alike(splits: Splits) -> int:
    """How many test prompts another split has."""
    elsewhere = {tuple(one.prompt_ids) for one in (*splits.train, *splits.validation)}
    return sum(tuple(one.prompt_ids) in elsewhere for one in splits.test)


def test_texts_with_the_same_prompt_are_one_document(tmp_path: Path, tokenizer: Fast) -> None:
    questions = [f"Question {n * 7} of all: {n}? " for n in range(30)]
    rows = [{"text": f"{question} Answer {k}: {WORDS}"} for question in questions for k in range(4)]
    splits = splits_of(tmp_path, rows, tokenizer, prompt_tokens=12, test_fraction=0.3)
    assert len(splits.test) == 9 * 4
    assert alike(splits) == 0
    assert splits.counts["prompts_shared"] == 0
    assert splits.counts["test_prompts_repeated"] == 9 * 3
    assert len({example.document for example in splits.test}) == 9


def test_a_prompt_that_two_splits_would_have_is_held_out(tmp_path: Path, tokenizer: Fast) -> None:
    """Later windows of texts that repeat themselves begin alike, whatever the texts begin with."""
    rows = [{"text": f"{n} {WORDS * 40}" if n < 20 else numbers(n)} for n in range(40)]
    splits = splits_of(tmp_path, rows, tokenizer, test_fraction=0.3, validation_fraction=0.3)
    everything = sum(len(examples_of(row, tokenizer)) for row in rows)
    assert alike(splits) == 0
    validated = {tuple(one.prompt_ids) for one in splits.validation}
    assert not any(tuple(one.prompt_ids) in validated for one in splits.train)
    assert everything - splits.counts["prompts_shared"] == sum(map(splits.counts.get, SPLITS))
    assert 0 < splits.counts["test_prompts_repeated"] < splits.counts["prompts_shared"]


# Bad rows

STRICT = byte_bpe(
    template="{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT
)
TWICE = {"messages": [*chat("a"), *chat("b", "c")]}
BAD = [
    ('{"messages": [', "not valid JSON (Expecting value at column 15); each line is one object"),
    (json.dumps(TWICE), "the chat template of target.path refuses it (roles must alternate)"),
    (json.dumps({"messages": [], "prompt": "a"}), "messages must be a list of at least one"),
    (json.dumps({"answer": "b"}), "nothing under messages, prompt or text; columns found: answer"),
    ('{"prompt": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deep to be read"),
    (json.dumps({"prompt": 3}), "the prompt must be text, got int"),
    (json.dumps({"prompt": "a", "completion": 3}), "the completion must be text, got int"),
]


def written(path: Path, lines: Sequence[str], **options: Any) -> Splits:
    """The splits of a file of `lines`."""
    path.write_text("".join(line + "\n" for line in lines))
    data = settings(path=str(path), **options)
    return make_splits(read_documents(data), data, STRICT, path.parent, context=4096)


def test_bad_rows_are_left_out_counted_and_shown_where_they_stand(tmp_path: Path) -> None:
    """What is left is read as if they had never been there."""
    good = [json.dumps({"messages": chat(f"say {n}", f"it is {n}")}) for n in range(120)]
    alone = written(tmp_path / "rows.jsonl", good)
    lines = [*good, *(line for line, _ in BAD), BAD[0][0]]
    lines[50], lines[-1] = lines[-1], lines[50]
    splits = written(tmp_path / "rows.jsonl", lines, max_bad_rows=8 / 128)
    assert (splits.sha256, alone.left_out) == (alone.sha256, [])
    assert splits.counts == alone.counts | {"rows_bad": 8}
    assert shares_cut(splits.counts)["rows_bad_share"] == 8 / 128
    places = [51, *range(122, 126)]
    shown = [BAD[0], *BAD[1:5]]
    for line, place, (_, reason) in zip(splits.left_out, places, shown, strict=False):
        assert line.startswith(f"data.path {tmp_path / 'rows.jsonl'}, line {place}: {reason}")
        assert "\n" not in line
    assert splits.left_out[0].endswith(" (1 more like it)")
    assert len(splits.left_out) == REASONS + 1  # the last is for all other reasons
    with pytest.raises(ValueError, match=r", line 51: .*; so 8 of 128 rows cannot be used, more "):
        written(tmp_path / "rows.jsonl", lines, max_bad_rows=7 / 128)
    few = written(tmp_path / "rows.jsonl", lines, max_rows=50)  # the bad ones come later
    assert (few.counts["documents"], few.counts["rows_bad"]) == (50, 0)


@pytest.mark.parametrize(
    "row", [*BAD, (json.dumps({"messages": chat("a"), "tools": "f"}), "tools")]
)
def test_a_file_of_bad_rows_alone_is_refused_when_the_first_are_read(
    row: tuple[str, str],
) -> None:
    data, taken = settings(max_bad_rows=0.5), []

    def documents() -> Iterator[Document]:
        while True:
            taken.append(len(taken) + 1)
            try:
                content: Any = json.loads(row[0])
            except (ValueError, RecursionError) as error:
                content = error
            yield read_document(content, data, f"line {taken[-1]}", "")

    with pytest.raises(ValueError, match=r"^line 1: ") as caught:
        list(RowReader(STRICT, data).read(documents()))
    assert str(caught.value).endswith("; so none of the first 256 rows can be used")
    assert len(taken) == TOGETHER


def test_a_source_that_cannot_be_read_on_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"fine\n\ncaf\xe9\n\n" * 90)
    data = settings(path=str(tmp_path / "rows.txt"), max_bad_rows=1)
    with pytest.raises(ValueError, match="not UTF-8 text"):
        make_splits(read_documents(data), data, STRICT, tmp_path)


# Refusals

ENDLESS, TEMPLATED = endless(), byte_bpe(template=CHAT)
MUTE = byte_bpe(template="{{ raise_exception('Roles must\nalternate') }}")
NO_CHAT = "line 1: the chat template of target.path refuses it (Roles must): change such rows"
REFUSED: list[tuple[list[Any], Fast, str]] = [
    ([{"text": WORDS}], ENDLESS, "tokenizer has no EOS token"),
    ([{"prompt": "a", "completion": "b"}], ENDLESS, "tokenizer has no EOS token"),
    ([{"messages": chat("a", "b")}], byte_bpe(), "holds `messages`, but the tokenizer of target"),
    ([{"messages": chat("a"), "tools": [{}]}], TEMPLATED, "holds `tools`, of which the chat templ"),
    ([{"messages": chat("first\nwords", "b")}], MUTE, NO_CHAT),
    ([{"prompt": "first\nwords"}], MUTE, NO_CHAT),
    (
        [{"text": "a" * n} for n in (1, 2, 3)],
        byte_bpe(),
        "row of the train split is usable, all ar",
    ),
    ([{"messages": chat(f"{n}" * 50)} for n in range(9)], TEMPLATED, "longer than 40 tokens of pr"),
    (
        [{"prompt": f"{n} {WORDS * 9}", "completion": "a"} for n in range(9)],
        byte_bpe(),
        "no row of the train split is usable, all are equal in their prompts to held-out ones",
    ),
    ([{"text": f"{WORDS} {n}"} for n in range(30)], byte_bpe(), "gives 1 different documents, and"),
]


@pytest.mark.parametrize(("rows", "tokenizer", "words"), REFUSED)
def test_rows_that_cannot_be_used_are_one_line_and_leave_nothing(
    tmp_path: Path, rows: list[Any], tokenizer: Fast, words: str
) -> None:
    with pytest.raises(ValueError, match=r"^data\.path|^target\.path") as caught:
        splits_of(tmp_path, rows, tokenizer, max_prompt_tokens=40)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
