"""One vocabulary for both models: checked, trimmed, and made where there is none.

Speculative sampling compares p(x) and q(x) id by id, so target and draft must mean the same text
by the same id. Embedding tables may be padded beyond the tokenizer (151936 and 152064 rows for
one and the same Qwen vocabulary): logits are cut at the *real* size that this module computes.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` ids; id 0 ends a text and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def check_same_tokenizer(
    *, target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError with the first difference unless every id means the same text in both."""
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return
    different = sorted(
        set(target.items()) ^ set(draft.items()), key=lambda item: (item[1], item[0])
    )
    token, token_id = different[0]
    owner = "target" if target.get(token) == token_id else "draft"
    raise ValueError(
        f"draft.path: target and draft have different vocabularies ({len(target)} and "
        f"{len(draft)} tokens; id {token_id} is {token!r} only in the {owner}): "
        "choose a draft that was trained with the target's tokenizer"
    )


def real_vocab_size(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, key: str) -> int:
    """Return the number of ids that text can use: logits are cut to it.

    Raises ValueError naming `key` where the model has fewer rows than the tokenizer has ids.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    rows = config.get_text_config().vocab_size
    if rows < size:
        raise ValueError(
            f"{key}.path: the model has {rows} embedding rows, its tokenizer {size} ids: "
            "resize the embeddings or give the folder the tokenizer it was trained with"
        )
    return size
