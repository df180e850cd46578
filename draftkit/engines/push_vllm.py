"""New weights for the drafter of a vLLM that runs: an extension of its workers.

This file needs torch, safetensors and vLLM (0.32, 0.33) alone. Copy it to where vLLM's Python finds
it, and start the engine with it; the routes that call it are there in development mode only:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=FOLDER_OF_THE_COPY vllm serve TARGET --host 127.0.0.1 \\
        --speculative-config '{...}' --worker-extension-cls push_vllm.Push [--enforce-eager: CPUs]

`POST /collective_rpc {"method": NAME, "args": [strings]}` answers {"results": [one per worker]}. A
worker that raises costs the connection, so an error is an answer: {"error": one line}.

Weights go in by vLLM's layerwise reload, which packs them anew (on CPUs most parameters are empty,
and what computes is packed) and copies them into their old storage, of which CUDA graphs know.
What is in force is read by what computes: each layer is fed columns of the identity, of which it
makes columns of its weights, bit by bit, whatever it was packed into.
"""

import hashlib
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

COLUMNS = 128  # of each matrix, at most, that are read back; all rows are
NOT_READ = "t2d"  # follows from d2t
MASK = "mask_hidden"
NAMES = {"d2t": "draft_id_to_target_id"}  # of a head's file, and in vLLM


def answered(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, whose errors are its answers."""

    @wraps(method)
    def safely(self: Any, *words: str) -> Any:
        try:
            return method(self, *words)
        except Exception as error:
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())}

    return safely


class Push:
    """Methods that vLLM's worker gets beside its own; arguments are strings."""

    draftkit_served = ""

    @answered
    def draftkit_version(self: Any, version: str | None = None) -> dict[str, Any]:
        """What was last said to serve, after noting `version`; empty for the weights of launch."""
        if version is not None:
            self.draftkit_served = version
        return {"version": self.draftkit_served}

    @answered
    def draftkit_push(self: Any, folder: str, sums: str) -> dict[str, Any]:
        """Serve the weights in `folder`; sums: JSON, the SHA-256 of each of its files by name."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        for name, expected in json.loads(sums).items():
            if hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() != expected:
                raise ValueError(f"{Path(folder) / name} differs from its checksum")
        model, tensors = _drafter(self), self.draftkit_tensors(Path(folder))
        shared = {id(module) for module in self.get_model().modules()}
        for name in tensors:
            if name != NOT_READ and id(_owner(model, name)[0]) in shared:
                raise ValueError(f"{name} is the target's own in this engine: leave it out")
        self.draftkit_served = ""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(iter(tensors.items()))
            finally:  # what was not loaded comes back
                finalize_layerwise_reload(model, self.speculative_config.draft_model_config)
            self.draftkit_mend(model, tensors)
        return {}

    def draftkit_tensors(self, folder: Path) -> dict[str, Tensor]:
        """The weights in `folder` by their names."""
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def draftkit_mend(self: Any, model: Any, tensors: dict[str, Tensor]) -> None:
        """Renew what the reload leaves as it was: the packed copy of a tied head, and in a head
        for one pass the states behind its masks."""
        if getattr(model.config, "tie_word_embeddings", False):
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        if MASK in tensors:
            model.mask_hidden.copy_(tensors[MASK].view(1, -1))
            held, states = _masked(self, model)
            held.copy_(states)

    @answered
    def draftkit_read(self: Any, folder: str) -> dict[str, Any]:
        """What computes in the place of each tensor of `folder`: `read` has of each its name, which
        part of it this worker has (rows and columns as start, stop, step), its dtype, and the
        SHA-256 of that part in that dtype."""
        model, tensors = _drafter(self), self.draftkit_tensors(Path(folder))
        with torch.inference_mode():
            read = [
                _read(model, name, list(tensor.shape))
                for name, tensor in tensors.items()
                if name != NOT_READ
            ]
            for entry in (entry for entry in read if entry["name"] == MASK):
                if not torch.equal(*_masked(self, model)):
                    entry["sha256"] = "its states are of other weights"
        return {"read": read}


def _drafter(worker: Any) -> Any:
    """The model that drafts. Raises ValueError for an engine in which it cannot be changed."""
    model = worker.get_draft_model()
    if model is None:
        raise ValueError("the engine has no drafter: start vLLM with --speculative-config")
    if worker.device.type == "cpu" and int(worker.vllm_config.compilation_config.mode or 0):
        raise ValueError(
            "code compiled for CPUs keeps the weights that it was compiled with: start vLLM with "
            "--enforce-eager"
        )
    return model


def _masked(worker: Any, model: Any) -> tuple[Tensor, Tensor]:
    """Of a head for one pass, the states [H] behind its masks: those that vLLM holds, which it
    computes once, and those of the weights."""
    held = worker.model_runner.drafter.parallel_drafting_hidden_state_tensor
    return held.view(-1), model.combine_hidden_states(model.mask_hidden.view(-1)).view(-1)


def _owner(model: Any, name: str) -> tuple[Any, str, int]:
    """The module that computes with the tensor `name` of a file; its name there; of several that
    vLLM joins in one, its number. Raises ValueError where there is none."""
    path, _, kind = name.replace("midlayer.", "layers.0.").rpartition(".")
    stem, _, leaf = path.rpartition(".")
    number, kind = 0, NAMES.get(kind, kind)
    for joined, parts in getattr(model, "packed_modules_mapping", {}).items():
        if leaf in parts:
            path, number = f"{stem}.{joined}", parts.index(leaf)
    for prefix in ("", "model."):  # a head's names lack it
        try:
            module = model.get_submodule(prefix + path if path else "")
        except AttributeError:
            continue
        if isinstance(getattr(module, kind, None), Tensor):
            return module, kind, number
    raise ValueError(f"the engine's drafter has no {name}: start vLLM with the exported drafter")


def _part(module: Any, number: int) -> tuple[int, int, int, int, list[int]]:
    """Of the matrix `number` in a layer: first row and rows, first column and columns that this
    worker has, and the shape of the whole."""
    if hasattr(module, "shard_indices"):  # embeddings and heads
        first, end = (
            getattr(module.shard_indices, f"org_vocab_{one}_index") for one in ("start", "end")
        )
        columns = module.embedding_dim
        return first, end - first, 0, columns, [module.org_vocab_size, columns]
    copies = getattr(module, "num_kv_head_replicas", 1) if number else 1
    rows = module.output_partition_sizes[number]
    all_rows = getattr(module, "output_sizes", [module.output_size])[number] // copies
    first = module.tp_rank // copies * rows if rows != all_rows else 0
    columns = getattr(module, "input_size_per_partition", module.input_size)
    begin = module.tp_rank * columns if columns != module.input_size else 0
    return first, rows, begin, columns, [all_rows, module.input_size]


def _read(model: nn.Module, name: str, shape: list[int]) -> dict[str, Any]:
    """An entry of `draftkit_read`. Raises ValueError where the tensor has another `shape`."""
    module, kind, number = _owner(model, name)
    held = getattr(module, kind)
    if getattr(module, "quant_method", None) is None:  # a norm, ids: these compute as they lie
        first, rows, begin, columns, whole = 0, held.shape[0], 0, held[0].numel(), [*held.shape]
        step, values = 1, held
    else:
        first, rows, begin, columns, whole = _part(module, number)
        step = -(-columns // COLUMNS)
        chosen = torch.arange(0, columns, step, device=held.device)
        dtype = getattr(module, "params_dtype", held.dtype)
        given = torch.zeros(len(chosen), columns, dtype=dtype, device=held.device)
        if kind == "bias":
            whole, columns, step = whole[:1], 1, 1
            values = module.quant_method.apply(module, given[:1], bias=held)[0]
        elif hasattr(module, "shard_indices") and not hasattr(module, "bias"):  # embeddings
            ids = torch.arange(rows, device=held.device)
            values = module.quant_method.embedding(module, ids)[:, chosen]
        else:
            given[torch.arange(len(chosen)), chosen] = 1
            values = module.quant_method.apply(module, given, bias=None).T
        offset = sum(getattr(module, "output_partition_sizes", ())[:number])
        values = values[offset : offset + rows]
    if shape != whole:
        raise ValueError(
            f"{name} has the shape {shape}, and {whole} in the engine's drafter: start vLLM with "
            "the exported drafter"
        )
    return {
        "name": name,
        "rows": [first, first + rows, 1],
        "columns": [begin, begin + columns, step],
        "dtype": str(values.dtype).removeprefix("torch."),
        "sha256": digest(values),
    }


def digest(values: Tensor) -> str:
    """The SHA-256 of the bytes of `values`; both zeros count as one."""
    content = (values.cpu() + 0).contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()
