"""What the steps of a plan take at least, from the shapes of the models alone: nothing is loaded.

Memory counts what has to be there at once: weights, gradients and moments, caches, activations
that a backward pass needs, probabilities that are kept. Work counts the operations of the matrix
products and the weights that have to be read; a device takes at least the longer of both. What is
left out (attention over long texts, kernels, waiting) only adds to it: these are lower bounds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from statistics import fmean

import torch
from transformers import PreTrainedConfig

from draftkit.config import Config, DeviceConfig, ModelConfig
from draftkit.data.prompts import Splits
from draftkit.evaluation.walltime import FIRST_LOOK
from draftkit.models.loading import llama_config, model_config
from draftkit.models.memory import cache_bytes, weight_count
from draftkit.models.shrink import chosen_layers

FLOAT32 = 4  # bytes
TRAINED = 16  # bytes of a weight that learns: itself, its gradient, two moments
CHECKPOINT, BEST = 12, 4  # bytes of it in files; of both there are two while they are written
# Numbers of a token and layer that a backward pass needs, in units of the hidden size and of the
# inner one: inputs of norms and products, and of the gate.
SAVED_HIDDEN, SAVED_INNER = 6, 3
FORWARD, TRAINING = 2, 6  # operations of a weight and token
KEPT_SCORES = 2  # probabilities of the target and logits of a draft, of a whole batch


@dataclass(frozen=True)
class Shape:
    """A model's configuration and the number of its weights."""

    config: PreTrainedConfig
    weights: int
    stored: torch.dtype | None = None  # of the files, where there are any

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def hidden(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def inner(self) -> int:
        return getattr(self.config.get_text_config(), "intermediate_size", None) or 4 * self.hidden

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def body(self) -> int:
        """Weights of the layers: a token reads all of them, and of the embeddings one row."""
        tables = 1 if self.config.get_text_config().tie_word_embeddings else 2
        return self.weights - tables * self.vocab_size * self.hidden

    @property
    def read(self) -> int:
        """Weights that a step of decoding reads: layers and head."""
        return self.body + self.vocab_size * self.hidden

    def operations(self, tokens: float, predicted: float, each: int = FORWARD) -> float:
        """Of a pass over `tokens`, of which so many are `predicted` by the head."""
        return each * (self.body * tokens + self.vocab_size * self.hidden * predicted)


@dataclass(frozen=True)
class TextLengths:
    """Tokens of the texts: the longest prompt and answer, and their means."""

    prompt: int
    answer: int
    mean_prompt: float
    mean_answer: float  # of the data
    rows: int  # of the training split; 0: not known

    @property
    def longest(self) -> int:
        return self.prompt + self.answer


ANY_LENGTH = TextLengths(1, 1, 1, 1, 1)  # of texts that are not known: no bound is above the truth
COUNTED = 512  # rows whose lengths stand for all


def lengths_of_splits(splits: Splits) -> TextLengths:
    """Those of texts that are read already; answers of the data stand for those of the target."""
    room, some = splits.room, [*islice(splits.train, COUNTED)]
    prompts = [len(one.prompt_ids) for one in some]
    answers = [sum(one.loss_mask) for one in some if one.has_completion] or [room.new]
    mean = min(room.new, fmean(answers))
    return TextLengths(room.total - room.new, room.new, fmean(prompts), mean, len(splits.train))


@dataclass(frozen=True)
class Work:
    """Operations, and bytes that have to be read meanwhile."""

    operations: float
    read: float

    def seconds(self, device: DeviceConfig) -> float:
        """What `device` takes at least."""
        assert device.flops is not None
        assert device.bandwidth is not None
        return max(self.operations / (device.flops * 1e12), self.read / (device.bandwidth * 1e9))


@dataclass(frozen=True)
class Demand:
    """What a step takes at least: bytes of memory by part, work, and bytes of files."""

    memory: Mapping[str, float] = field(default_factory=dict)
    work: tuple[Work, ...] = ()
    files: float = 0.0

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    def seconds(self, device: DeviceConfig) -> float:
        return sum(one.seconds(device) for one in self.work)


@dataclass(frozen=True)
class Case:
    """An experiment as far as its shapes are concerned.

    dtype: of what is served. mapped: weights of that dtype are pages of their files, as on a CPU,
    and no memory of the process.
    """

    config: Config
    target: Shape
    draft: Shape
    texts: TextLengths
    dtype: torch.dtype
    mapped: bool = False

    def dtype_of(self, key: str) -> torch.dtype:
        name = getattr(self.config, key).dtype
        return self.dtype if name is None else getattr(torch, name)

    def served(self, key: str) -> float:
        """Bytes of the model of section `key` as it is served."""
        shape, dtype = getattr(self, key), self.dtype_of(key)
        in_files = self.mapped and shape.stored in (dtype, None)
        return 0 if in_files else shape.weights * dtype.itemsize

    def read_bytes(self, key: str) -> float:
        return getattr(self, key).read * self.dtype_of(key).itemsize

    def decoding(self, key: str, rows: int, lengths: tuple[float, float], at_once: int) -> Work:
        """`rows` prompts and answers of the mean `lengths`, so many decoded `at_once`."""
        shape, (prompt, answer) = getattr(self, key), lengths
        rounds = ceil(rows / at_once) * answer
        operations = shape.operations(rows * (prompt + answer), rows * answer)
        return Work(operations, rounds * self.read_bytes(key))

    def scoring(self, key: str, texts: int, answer: float) -> Work:
        """One pass over `texts` with answers of that mean length."""
        shape: Shape = getattr(self, key)
        tokens = texts * (self.texts.mean_prompt + answer)
        return Work(shape.operations(tokens, texts * answer), self.read_bytes(key))

    def caches(self, key: str, rows: int, dtype: torch.dtype | None = None) -> float:
        """Of `rows` texts as long as they get."""
        shape: Shape = getattr(self, key)
        return cache_bytes(
            shape.config, rows=rows, slots=self.texts.longest, dtype=dtype or self.dtype_of(key)
        )


def shape_of(config: PreTrainedConfig, *, stored: torch.dtype | None = None) -> Shape:
    """The shape of a configuration; the model is not made."""
    return Shape(config, weight_count(config), stored)


def pair_shapes(config: Config) -> tuple[Shape, Shape]:
    """Those of target and draft, of files or to be made. ValueError naming what is not there."""
    target = _given(config.target, "target")
    if target is None:
        target = shape_of(llama_config(config.target.pretrain, config.data.vocab_size))
    draft = _given(config.draft, "draft")
    if draft is None and config.draft.shrink.layers:
        cut = type(target.config).from_dict(target.config.to_dict())
        text = cut.get_text_config()
        layers = chosen_layers(config.draft.shrink.layers, text.num_hidden_layers)
        text.num_hidden_layers = len(layers)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[one] for one in layers]
        draft = shape_of(cut)
    if draft is None:
        draft = shape_of(llama_config(config.draft.pretrain, target.vocab_size))
    return target, draft


def _given(model: ModelConfig, key: str) -> Shape | None:
    if model.path is None:
        return None
    config = model_config(model, key)
    stored = config.dtype
    return shape_of(config, stored=stored if isinstance(stored, torch.dtype) else None)


# What each kind of step takes, by its name


def _pretraining(case: Case, shape: Shape, steps: int, rows: int) -> Demand:
    tokens = rows * case.texts.longest
    learns = {
        "weights, gradients and moments": float(TRAINED * shape.weights),
        "activations of plain training": activations(shape, tokens, kept=True),
    }
    passes = Work(shape.operations(steps * tokens, steps * tokens, TRAINING), 0)
    return Demand(learns, (passes,), files=(2 * CHECKPOINT + BEST) * shape.weights)


def target(case: Case) -> Demand:
    """Of training a target from nothing."""
    options = case.config.target.pretrain
    return _pretraining(case, case.target, options.max_steps, options.per_device_train_batch_size)


def prepare(case: Case) -> Demand:
    """Of making a drafter: training it, and the target that it is cut out of."""
    options, cut = case.config.draft.pretrain, case.config.draft.shrink
    if not cut.layers:
        steps = options.max_steps
        return _pretraining(case, case.draft, steps, options.per_device_train_batch_size)
    whole = {"target": case.served("target")}
    trained = _pretraining(case, case.draft, cut.steps, options.per_device_train_batch_size)
    if not cut.steps:
        return Demand(whole, files=FLOAT32 * case.draft.weights)
    return Demand(max(whole, trained.memory, key=_total), trained.work, trained.files)


def generate(case: Case) -> Demand:
    """Of the target's answers to training prompts."""
    options = case.config.generate
    if options.engine != "decoder":
        return Demand()
    size, answer = min(options.batch_size, options.rollouts), case.texts.mean_answer
    lengths = (case.texts.mean_prompt, answer)
    return Demand(
        {"target": case.served("target"), "its cache": case.caches("target", size)},
        (case.decoding("target", options.rollouts, lengths, size),),
    )


def contexts(case: Case) -> Demand:
    """Of the target's answers to held-out prompts."""
    options = case.config.evaluate
    rows = options.prompts + options.validation_prompts
    size = min(options.batch_size, rows)
    lengths = (case.texts.mean_prompt, min(options.max_new_tokens, case.texts.mean_answer))
    return Demand(
        {"target": case.served("target"), "its cache": case.caches("target", size)},
        (case.decoding("target", rows, lengths, size),),
    )


def scores(case: Case) -> Demand:
    """Of the target's most likely ids at every token of the training texts."""
    count = case.texts.rows
    if case.config.source.name == "target":
        count = case.config.generate.rollouts
    work = case.scoring("target", count, case.texts.mean_answer)
    return Demand({"target": case.served("target")}, (work,))


def activations(shape: Shape, tokens: float, *, kept: bool) -> float:
    """Bytes that a backward pass needs in 16 bits, at least; not `kept`, of one layer at a time."""
    of_a_layer = SAVED_HIDDEN * shape.hidden + SAVED_INNER * shape.inner
    layers = shape.layers if kept else 1
    return 2 * tokens * (layers * of_a_layer + (0 if kept else shape.layers * shape.hidden))


def train(case: Case) -> Demand:
    """Of fitting the drafter, with the trials of its rate."""
    config, options, draft = case.config, case.config.optim, case.draft
    lengths = (case.texts.mean_prompt, case.texts.mean_answer)
    steps = options.max_steps * (1 + len(config.optim.rate_factors) / 4)
    rows, longest = options.per_device_train_batch_size, case.texts.longest
    learning = 1.0
    if config.draft.lora.rank:  # a share of the weights, too small to count
        learning = 0.0
    memory = {
        "target": 0 if config.generate.top_k else case.served("target"),
        "drafter, gradients and moments": (FLOAT32 + learning * (TRAINED - FLOAT32))
        * draft.weights,
        "activations": activations(
            draft, rows * longest, kept=not options.activation_checkpointing
        ),
    }
    texts = steps * options.rows_of_a_process
    tokens, predicted = texts * sum(lengths), texts * lengths[1]
    work = [Work(draft.operations(tokens, predicted, TRAINING), steps * case.read_bytes("draft"))]
    if not config.generate.top_k:
        work.append(Work(case.target.operations(tokens, predicted), 0))
    if config.source.name in ("draft", "mix", "replay"):
        share = config.source.fraction if config.source.name == "mix" else 1.0
        at_once = options.rows_of_a_process * config.source.refresh_steps
        at_once = min(at_once, config.generate.batch_size)
        work.append(case.decoding("draft", int(texts * share), lengths, at_once))
    checked = (options.max_steps // options.eval_steps + 1) * config.evaluate.validation_prompts
    answer = min(config.evaluate.max_new_tokens, case.texts.mean_answer)
    work += [case.scoring(key, checked, answer) for key in ("target", "draft")]
    files = (2 * CHECKPOINT + 2 * BEST) * learning * draft.weights + FLOAT32 * draft.weights
    return Demand(memory, tuple(work), files)


def evaluate(case: Case) -> Demand:
    """Of judging: scoring, timed decoding, the identity check where it needs no more memory."""
    config, options = case.config, case.config.evaluate
    drafts = 2 if options.draft == "trained" else 1
    answer = min(options.max_new_tokens, case.texts.mean_answer)
    lengths = (case.texts.mean_prompt, answer)
    served = {"target": case.served("target"), "drafters": drafts * case.served("draft")}
    scoring = options.batch_size * min(options.max_new_tokens, case.texts.answer)
    kept = KEPT_SCORES * FLOAT32 * min(scoring, options.prompts * options.max_new_tokens)
    probabilities = {"probabilities of a batch": kept * case.target.vocab_size}
    work: list[Work] = []
    for _ in options.temperatures or [0]:
        work += [case.scoring("target", options.prompts, answer)]
        work += drafts * [case.scoring("draft", options.prompts, answer)]
        size, rows = options.timing_batch_size, min(options.timing_prompts, FIRST_LOOK)
        plain = case.decoding("target", rows, lengths, size)
        # With every proposal accepted; prompt lookup is timed beside the drafts.
        rounds = replace_reads(plain, 1 / (config.proposals + 1))
        work += [plain, *(drafts + 1) * [rounds]]
        work += drafts * [case.decoding("draft", rows, lengths, size)]
    if options.lossless != "off":
        size = min(options.batch_size, options.lossless_prompts)
        plain = case.decoding("target", options.lossless_prompts, lengths, size)
        rounds = replace_reads(plain, 1 / (max(config.proposals, 1) + 1))
        work += [plain, *drafts * [rounds]]
        compared = {"caches": case.caches("target", size) + case.caches("draft", size)}
        kept_now = max(probabilities, compared, key=_total)
        return Demand({**served, **kept_now}, tuple(work))
    return Demand({**served, **probabilities}, tuple(work))


def replace_reads(work: Work, share: float) -> Work:
    """The same operations with a `share` of the reads: several tokens a pass."""
    return Work(work.operations, share * work.read)


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


DEMANDS: Mapping[str, Callable[[Case], Demand]] = {
    one.__name__: one for one in (target, prepare, generate, contexts, scores, train, evaluate)
}
