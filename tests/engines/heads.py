"""EAGLE-3 heads tensor by tensor, and what they propose by the formulas of the format.

An oracle for engines that shares nothing with draftkit's own heads. `fitted` needs no training: its
attention sees the slot of its own token alone, and three regressions by least squares lead from a
slot (token x_t, features f_(t-1)) to the target's last state at t.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad, silu

LAYER = "layers.0."
SHARP = 4.0  # of queries and keys: the slot of the own token wins by far
RIDGE = 1e-3  # of the mean diagonal
# Options of other trainers that change what is computed: none is used.
OFF = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")


@dataclass(frozen=True, kw_only=True)
class Head:
    """config.json and the tensors of the file. embeddings [V, H]: the target's."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    embeddings: Tensor

    def write(self, folder: Path) -> Path:
        """The folder as engines load it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def changed(self, **tensors: Tensor) -> "Head":
        """With other tensors; of a name the dots are two underscores."""
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return replace(self, tensors={**self.tensors, **named})


def features_of(target: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of `tokens` [B, T]: the states that a head reads [B, T, 3 H], and the last one [B, T, H] as
    the target's head gets it."""
    layers = target.config.num_hidden_layers
    with torch.inference_mode():
        states = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[k] for k in (2, layers // 2, layers - 3)], dim=-1), states[-1]


def rms(states: Tensor, eps: float = 1e-6) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """W [out, in] of the least |inputs W^T - outputs|, of inputs [N, in] and outputs [N, out]."""
    x, y = inputs.double(), outputs.double()
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=x.dtype)
    return torch.linalg.solve(gram, x.T @ y).T.float()


def fitted(target: Any, rows: Tensor, *, ids: Tensor, wide: int = 1024) -> Head:
    """A head for a Llama `target` with as many key as query heads, fitted to texts `rows` [B, T].

    ids [U]: which it proposes, ascending. wide: of its feed-forward.
    """
    shape = target.config
    hidden, norm = shape.hidden_size, target.model.norm.weight.detach()
    embeddings = target.model.embed_tokens.weight.detach().float()
    features, last = features_of(target, rows)
    states = last / norm  # of root mean square 1, so that the last norm leaves them as they are
    before, goal = (one.flatten(0, 1) for one in (features[:, :-1], states[:, 1:]))
    token = rms(embeddings[rows[:, 1:]]).flatten(0, 1)
    fc = least_squares(before, states[:, :-1].flatten(0, 1))
    residual = before @ fc.T
    output = least_squares(token, goal - residual)
    residual = residual + token @ output.T
    random = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(wide, hidden, generator=random) / hidden**0.5 for _ in range(2))
    inner = silu(rms(residual) @ gate.T) * (rms(residual) @ up.T)
    eye, none, ones = torch.eye(hidden), torch.zeros(hidden, hidden), torch.ones(hidden)
    tensors = {
        "fc.weight": fc,
        **{f"{LAYER}self_attn.{n}_proj.weight": torch.cat([SHARP * eye, none], 1) for n in "qk"},
        f"{LAYER}self_attn.v_proj.weight": torch.cat([eye, none], 1),
        f"{LAYER}self_attn.o_proj.weight": output,
        f"{LAYER}mlp.gate_proj.weight": gate,
        f"{LAYER}mlp.up_proj.weight": up,
        f"{LAYER}mlp.down_proj.weight": least_squares(inner, goal - residual),
        **{f"{LAYER}{name}.weight": ones.clone() for name in ("input_layernorm", "hidden_norm")},
        f"{LAYER}post_attention_layernorm.weight": ones.clone(),
        "norm.weight": norm.float(),
        "lm_head.weight": embeddings[ids],
    }
    if len(ids) != shape.vocab_size:
        tensors["d2t"] = ids - torch.arange(len(ids))
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        **{"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": 1},
        **{"num_attention_heads": shape.num_attention_heads, "head_dim": shape.head_dim},
        **{"num_key_value_heads": shape.num_key_value_heads, "rms_norm_eps": shape.rms_norm_eps},
        **{"rope_theta": shape.rope_parameters["rope_theta"], "hidden_act": "silu"},
        **{"vocab_size": shape.vocab_size, "draft_vocab_size": len(ids)},
        **{"max_position_embeddings": shape.max_position_embeddings, "dtype": "float32"},
        **{"tie_word_embeddings": False, **dict.fromkeys(OFF, False)},
    }
    return Head(config=config, tensors=tensors, embeddings=embeddings)


def parallel(head: Head, features: Tensor, *, token: int) -> Head:
    """The same head for one pass: masks are `token`, their states the mean of `features`."""
    mean = features.flatten(0, -2).mean(0, keepdim=True)
    tensors = {**head.tensors, "mask_hidden": mean}
    return replace(head, config={**head.config, "pard_token": token}, tensors=tensors)


def shuffled(head: Head, *, std: float = 0.02) -> Head:
    """A head of the same shapes whose matrices are random."""
    random = torch.Generator().manual_seed(1)
    return replace(
        head,
        tensors={
            name: one if one.dim() == 1 else torch.randn(one.shape, generator=random) * std
            for name, one in head.tensors.items()
        },
    )


def swapped(head: Head) -> Head:
    """A head that takes the first state that it reads for the last one."""
    low, middle, high = head.tensors["fc.weight"].chunk(3, dim=1)
    return head.changed(fc__weight=torch.cat([high, middle, low], dim=1))


def proposals(head: Head, tokens: Tensor, features: Tensor, steps: int) -> Tensor:
    """Target ids [steps, T - 1]: what follows tokens[: t + 1] is proposed in column t - 1.

    Proposal k is the one behind k proposals that were accepted, so of the text's own tokens.
    tokens [T], features [T, 3 H]: of one text. A parallel head proposes all behind true ones.
    """
    at = {name.removesuffix(".weight"): tensor for name, tensor in head.tensors.items()}
    width, count = head.config["head_dim"], len(tokens) - 1
    where = torch.arange(count)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    frequencies = head.config["rope_theta"] ** -(torch.arange(0, width, 2) / width)

    def rotated(states: Tensor, by: int) -> Tensor:
        """[T, A D] as [A, T, D], turned by positions from `by` on."""
        angle = ((where + by)[:, None] * frequencies).repeat(1, 2)
        one = states.view(count, -1, width).transpose(0, 1)
        left, right = one.chunk(2, dim=-1)
        return one * angle.cos() + torch.cat([-right, left], dim=-1) * angle.sin()

    mask = head.config.get("pard_token")
    state, keys, values, made = features[:-1] @ at["fc"].T, [], [], []
    for step in range(steps):
        given = pad(tokens, (0, steps))[1 + step : 1 + step + count]
        if step and mask is not None:
            given = torch.full_like(given, mask)
            state = (at["mask_hidden"] @ at["fc"].T).expand(count, -1)
        normed = rms(state) * at[f"{LAYER}hidden_norm"]
        token = rms(head.embeddings[given]) * at[f"{LAYER}input_layernorm"]
        slot = torch.cat([token, normed], dim=-1)
        query, key, value = (slot @ at[f"{LAYER}self_attn.{one}_proj"].T for one in "qkv")
        query = rotated(query, step)
        keys.append(rotated(key, step))
        values.append(value.view(count, -1, width).transpose(0, 1))
        scores = [(query @ keys[0].transpose(1, 2)).masked_fill(~causal, -torch.inf)]
        scores += [(query * one).sum(-1, keepdim=True) for one in keys[1:]]
        shares = (torch.cat(scores, dim=-1) / width**0.5).softmax(-1)
        seen = shares[..., :count] @ values[0]
        for number, one in enumerate(values[1:]):
            seen = seen + shares[..., count + number, None] * one
        joined = seen.transpose(0, 1).reshape(count, -1)
        state = state + joined @ at[f"{LAYER}self_attn.o_proj"].T
        normed = rms(state) * at[f"{LAYER}post_attention_layernorm"]
        inner = silu(normed @ at[f"{LAYER}mlp.gate_proj"].T) * (
            normed @ at[f"{LAYER}mlp.up_proj"].T
        )
        state = state + inner @ at[f"{LAYER}mlp.down_proj"].T
        ids = ((rms(state) * at["norm"]) @ at["lm_head"].T).argmax(-1)
        made.append(ids + at["d2t"][ids] if "d2t" in at else ids)
    return torch.stack(made)


def rounds(proposed: Tensor, text: Sequence[int], *, begin: int, end: int, capped: bool) -> list:
    """How many of `proposed` [K, T - 1] each pass accepts greedily, from the text's token `begin`
    on, whose features are not known yet, to its token `end`; `capped`: none is proposed beyond."""
    accepted, at = [], begin
    while at < end:
        most = min(len(proposed), end - at - 1) if capped else len(proposed)
        hits = [int(proposed[k, at - 1]) == text[at + 1 + k] for k in range(most)]
        accepted.append(hits.index(False) if False in hits else most)
        at += accepted[-1] + 1
    return accepted
