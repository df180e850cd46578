"""A remembered model says what the model says, and reads every text once."""

import pytest
import torch

from draftkit.models.adapter import CausalAdapter
from draftkit.models.remembered import RememberedAdapter
from tests import tiny


class Counting(CausalAdapter):
    """Counts the rows it reads."""

    rows = 0

    def states(self, tokens, keep, packing=None):
        self.rows += len(tokens)
        return super().states(tokens, keep, packing)


@pytest.fixture(params=["llama", "gemma2"])  # with a head of its own, and with capped logits
def pair(request):
    model = tiny.model(request.param).requires_grad_(False)
    counting = Counting(model, vocab_size=tiny.VOCAB_SIZE)
    return counting, RememberedAdapter(counting)


def rows(lengths, given=2):
    texts = tiny.prompts(lengths, seed=1)
    width = max(lengths)
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    keep = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, given - 1 : length - 1] = True
    return tokens, keep


def test_it_says_the_same_whatever_was_read_before(pair):
    plain, remembered = pair
    tokens, keep = rows([9, 4, 12, 7])
    with torch.no_grad():
        expected = plain.score(tokens, keep)
        part = torch.tensor([2, 0])
        torch.testing.assert_close(
            remembered.score(tokens[part], keep[part]), plain.score(tokens[part], keep[part])
        )
        torch.testing.assert_close(remembered.score(tokens, keep), expected)
        torch.testing.assert_close(remembered.score(tokens, keep), expected)


def test_each_text_is_read_once_whatever_its_padding(pair):
    plain, remembered = pair
    tokens, keep = rows([9, 4, 12])
    with torch.no_grad():
        remembered.score(tokens, keep)
        assert plain.rows == 3
        remembered.score(tokens[:2, :9], keep[:2, :9])
        assert plain.rows == 3
        other = keep.clone()
        other[1, 1] = False  # another part of it is asked for
        other[2, 0] = True
        found = remembered.score(tokens, other)
        assert plain.rows == 3
        torch.testing.assert_close(found, plain.score(tokens, other))


def test_a_model_that_learns_is_refused():
    with pytest.raises(AssertionError):
        RememberedAdapter(tiny.adapter())
