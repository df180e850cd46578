"""Which chains of masks a text teaches, and which id stands for a mask."""

import pytest
import torch

from draftkit.models.parallel import LEAST_KEPT, Parallel, check_unused, depths, free_id
from tests import tiny

MASK = 250
GENERATOR = torch.Generator()


def test_a_share_of_the_chains_goes_on_and_every_chain_is_whole() -> None:
    predicting = torch.rand(40, 50, generator=GENERATOR.manual_seed(0)) < 0.7
    depth = depths(predicting, 8, 0.7, GENERATOR.manual_seed(1))
    count = int(predicting.sum())
    assert bool(((depth > 0) == predicting).all())
    for block in range(1, 8):
        share = max(0.7**block, LEAST_KEPT)
        assert int((depth > block).sum()) == round(share * count)
    again, other = (depths(predicting, 8, 0.7, GENERATOR.manual_seed(seed)) for seed in (1, 2))
    assert torch.equal(depth, again)
    assert not torch.equal(depth, other)


# The id of the masks


def test_a_padding_row_of_the_embeddings_is_taken_first() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert free_id(tokenizer, len(tokenizer) + 4, [[1, 2]]) == len(tokenizer)
    assert free_id(tokenizer, len(tokenizer) + 4, [[len(tokenizer)]]) == len(tokenizer) + 1


def test_then_a_special_token_that_nothing_uses_then_a_part_of_a_letter() -> None:
    tokenizer = tiny.byte_tokenizer()
    parts = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd"]
    assert free_id(tokenizer, len(tokenizer), [[max(parts)]]) == sorted(parts)[-2]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|spare|>"]})
    tokenizer.chat_template = "<|turn|>{{ messages }}"
    assert tokenizer.decode(free_id(tokenizer, len(tokenizer), [])) == "<|spare|>"


def test_without_an_id_to_spare_there_is_no_parallel_drafter() -> None:
    tokenizer = tiny.byte_tokenizer()
    with pytest.raises(ValueError, match=r"^draft\.kind: every id .* use draft\.kind=plain, or"):
        free_id(tokenizer, len(tokenizer), [range(len(tokenizer))])


def test_a_text_that_uses_the_masks_id_is_refused() -> None:
    check_unused(Parallel(MASK, 3), [[1, 2]])
    with pytest.raises(ValueError, match=rf"^draft\.path: id {MASK} .* text 1 of the training"):
        check_unused(Parallel(MASK, 3), [[1, 2], [MASK]])
