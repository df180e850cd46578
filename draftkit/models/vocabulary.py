"""One vocabulary for both models: checked and trimmed.

Speculative sampling compares p(x) and q(x) id by id, so target and draft must mean the same text
by the same id. Embedding tables may be padded beyond the tokenizer (151936 and 152064 rows for
one and the same Qwen vocabulary): logits are cut at the *real* size that this module computes.
"""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
