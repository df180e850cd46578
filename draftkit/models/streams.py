"""The residual streams of a model: what its layers hand on, which heads on a target read.

Stream k of a model of n layers is what stands in it behind k layers, the input of layer k; stream n
is the last hidden state, behind the final norm. (So `hidden_states` of transformers are numbered,
and the features of EAGLE-3, 2503.01840.) A model keeps them only in passes that ask for some.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.models.shrink import layer_count, layer_stack


class Streams:
    """Catches the streams of `model` in passes between `open` and `close`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._hooked: set[int] = set()
        self._caught: dict[int, Tensor] | None = None

    def open(self, layers: tuple[int, ...]) -> None:
        """Catch the streams of `layers` in the next pass.

        Raises ValueError for a model that has fewer, or does not show its layers.
        """
        for layer in layers:
            if layer not in self._hooked:
                self._hook(layer)
                self._hooked.add(layer)
        self._caught = {} if layers else None

    def close(self) -> dict[int, Tensor]:
        """What was caught, [B, N, H] of each layer; later passes keep nothing."""
        caught, self._caught = self._caught or {}, None
        return caught

    def _hook(self, layer: int) -> None:
        model: Any = self._model
        count = layer_count(model.config)

        def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._caught is not None:
                self._caught[layer] = given[0] if given else named["hidden_states"]

        def behind(_: nn.Module, given: Any, named: dict[str, Any], output: Any) -> None:
            if self._caught is not None:
                self._caught[layer] = output.last_hidden_state

        if layer == count:
            model.base_model.register_forward_hook(behind, with_kwargs=True)
        else:
            _, layers = layer_stack(model)
            layers[layer].register_forward_pre_hook(before, with_kwargs=True)
