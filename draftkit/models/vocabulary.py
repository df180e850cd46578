"""One vocabulary for both models: checked and trimmed.

Speculative sampling compares p(x) and q(x) id by id, so target and draft must mean the same text
by the same id. Embedding tables may be padded beyond the tokenizer (151936 and 152064 rows for
one and the same Qwen vocabulary): logits are cut at the *real* size that this module computes.
Ids that do not mean the same are never proposed, where `draft.extra_tokens` takes such a pair.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.config.choices import NEVER, REFUSE


def check_same_tokenizer(
    *,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
    extra_tokens: str = REFUSE,
) -> list[int]:
    """Raise ValueError with the first difference unless every id means the same text in both.

    extra_tokens: `never` allows added tokens to differ. Returns their ids, ascending.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    different = target.items() ^ draft.items()
    added = {
        *target_tokenizer.get_added_vocab().items(),
        *draft_tokenizer.get_added_vocab().items(),
    }
    if not different or (different <= added and extra_tokens == NEVER):
        return sorted({token_id for _, token_id in different})
    token, token_id = min(different - added or different, key=lambda item: (item[1], item[0]))
    owner = "target" if target.get(token) == token_id else "draft"
    way_out = "choose a draft that was trained with the target's tokenizer"
    if different <= added:
        way_out += ", or take this one by draft.extra_tokens=never: it never proposes such tokens"
    raise ValueError(
        f"draft.path: target and draft have different vocabularies ({len(target)} and "
        f"{len(draft)} tokens; id {token_id} is {token!r} only in the {owner}): {way_out}"
    )


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of ids that text can use."""
    return max(tokenizer.get_vocab().values()) + 1


def real_vocab_size(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, key: str) -> int:
    """Return the number of ids that text can use: logits are cut to it.

    Raises ValueError naming `key` where the model has fewer rows than the tokenizer has ids.
    """
    size = count_ids(tokenizer)
    rows = config.get_text_config().vocab_size
    if rows < size:
        raise ValueError(
            f"{key}.path: the model has {rows} embedding rows, its tokenizer {size} ids: "
            "resize the embeddings or give the folder the tokenizer it was trained with"
        )
    return size


@torch.no_grad()
def fit_rows(
    model: PreTrainedModel, *, rows: int, real: int, kept_ids: Tensor | None = None
) -> None:
    """Give `model` so many `rows` of embeddings and head, in place; tied ones stay tied.

    Every row beyond the `real` vocabulary, new or old, becomes the mean of the real rows. So its
    logit is the mean of the real logits: never above the largest one, so never the argmax, and by
    Jensen's inequality at most 1 / `real` of the probability that the real ids have together.
    Rows of zeros promise neither: their logit is 0, which wins where all others are negative.
    With `kept_ids` [K] the head gets weights of its own, with the mean of their rows at all others.
    """
    assert rows >= real
    model.resize_token_embeddings(rows, mean_resizing=False)
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tables = [embeddings.weight, head.weight, getattr(head, "bias", None)]
    for table in tables:
        if table is not None:
            table[real:] = table[:real].double().mean(0).to(table.dtype)
    if kept_ids is not None:
        untie(model)
        others = torch.ones(rows, dtype=torch.bool).index_fill(0, kept_ids.cpu(), False)
        for table in (head.weight, getattr(head, "bias", None)):
            if table is not None:
                table[others] = table[kept_ids].double().mean(0).to(table.dtype)


def untie(model: PreTrainedModel) -> None:
    """Give the head of `model` weights of its own, in place."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
