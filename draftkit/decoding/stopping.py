"""Where a row ends: end-of-text ids and length limits, decided on the device.

The first end-of-text id is kept and nothing after it. Tokens are *emitted* until then and
*committed* as far as the length limit allows: rates count emitted tokens, answers hold committed
ones. Knows nothing of models.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """How much of a round's candidates stays; all [B]."""

    emitted: Tensor  # tokens up to the first end of text, at least 1
    committed: Tensor  # of those, as many as the limit allows
    ended: Tensor  # bool: an end-of-text id was committed
    done: Tensor  # bool: nothing more may follow


def cut_round(
    candidates: Tensor, *, accepted: Tensor, remaining: Tensor, eos_token_ids: Tensor
) -> Cut:
    """Cut `candidates` [B, K + 1], of which the first `accepted` [B] + 1 are verified.

    `remaining` [B] is the number of tokens that may still be committed (at least 1);
    `eos_token_ids` [E] may be empty.
    """
    width = candidates.shape[1]
    index = torch.arange(width, device=candidates.device)
    # Also behind the accepted ones, unread there. (For many ids `isin` sorts, and waits for that.)
    is_end = (candidates[..., None] == eos_token_ids).any(-1)
    first_end = torch.where(is_end, index, width).amin(dim=1)
    emitted = torch.minimum(accepted, first_end) + 1
    committed = torch.minimum(emitted, remaining)
    ended = (first_end <= accepted) & (first_end < remaining)
    return Cut(emitted, committed, ended, ended | (committed == remaining))
