"""`python -m tests.engines.pairs FOLDER`: briefly trained pairs of the shapes that engines know.

A target of four layers and a drafter of one, with the embedded target's tokenizer, trained on the
text of an installation by next-token prediction: a minute and a half each on two cores. Llama with
heads of 32, Qwen3 with heads of 64, so that both are sizes that vLLM's CPU build attends with.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from draftkit.config import DataConfig, TargetConfig
from draftkit.data.corpora import read_documents
from draftkit.models.files import ModelFolder
from draftkit.models.loading import save_model

EMBEDDED = Path(__file__).parents[2] / "draftkit" / "embedded"
SHAPES = {"llama": (LlamaConfig, 32), "qwen3": (Qwen3Config, 64)}
HIDDEN, CONTEXT = 256, 512
ROWS, LENGTH = 16, 128
STEPS = 250


def text_rows(count: int) -> torch.Tensor:
    """Token ids [count, LENGTH] of the Python files of the corpus."""
    tokenizer = ModelFolder(TargetConfig(path=str(EMBEDDED))).tokenizer
    ids: list[int] = []
    for document in read_documents(DataConfig(domains=["python"])):
        ids += tokenizer(document.row["text"])["input_ids"]
        if len(ids) >= count * LENGTH:
            return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    raise AssertionError("the corpus has more text than that")


def trained(architecture: str, layers: int, rows: torch.Tensor, seed: int) -> PreTrainedModel:
    """A model after one pass over `rows`, ROWS at a time."""
    make, head = SHAPES[architecture]
    config = make(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // head,
        num_key_value_heads=HIDDEN // head // 2,
        head_dim=head,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=len(rows) // ROWS
        )
        for batch in rows.split(ROWS):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def make_pair(architecture: str, folder: Path, *, steps: int = STEPS) -> Path:
    """Write `target` and `draft` into `folder`, unless they are there."""
    if not (folder / "draft").is_dir():
        tokenizer = ModelFolder(TargetConfig(path=str(EMBEDDED))).tokenizer
        rows = text_rows(steps * ROWS)
        for name, layers, seed in (("target", 4, 0), ("draft", 1, 1)):
            save_model(trained(architecture, layers, rows, seed), tokenizer, folder / name)
    return folder


if __name__ == "__main__":
    for shape in SHAPES:
        make_pair(shape, Path(sys.argv[1]) / shape)
