"""The sampling of a generation_config.json: its keys, what is not there, and bad files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from draftkit.config import SamplingConfig, TargetConfig
from draftkit.models.served import FILE, served_sampling, unserved

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


@pytest.fixture
def model(tmp_path: Path) -> TargetConfig:
    (tmp_path / "config.json").write_text("{}")
    return TargetConfig(path=str(tmp_path))


def advise(model: TargetConfig, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (Path(model.location) / FILE).write_text(text)


def test_the_keys_that_the_file_has_are_taken_and_the_rest_is_the_default(
    model: TargetConfig,
) -> None:
    advise(model, QWEN)
    sampling, line = served_sampling(model, {})
    assert sampling == SamplingConfig(temperature=0.6, top_k=20, top_p=0.95)
    assert isinstance(sampling.top_k, int)
    assert line == (
        "sampling.from=model: temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1; "
        f"temperature, top_k, top_p of {model.path}/{FILE}"
    )
    advise(model, {"repetition_penalty": 1.05, "top_p": None})
    assert served_sampling(model, {})[0] == SamplingConfig(repetition_penalty=1.05)


def test_what_somebody_gives_wins_over_the_file(model: TargetConfig) -> None:
    advise(model, QWEN | {"top_p": "much"})
    sampling, line = served_sampling(model, {"temperature": 1.0, "top_p": 0.5})
    assert sampling == SamplingConfig(temperature=1.0, top_k=20, top_p=0.5)
    assert "(temperature, top_p as given); top_k of " in line


def test_do_sample_false_is_greedy_and_said(model: TargetConfig) -> None:
    advise(model, {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1})
    sampling, line = served_sampling(model, {})
    assert sampling == SamplingConfig(temperature=0.0, repetition_penalty=1.1)
    assert line.endswith("has do_sample: false, which is greedy")
    assert served_sampling(model, {"temperature": 0.7})[0].temperature == 0.7


def test_a_file_that_is_not_there_or_advises_nothing_is_said(model: TargetConfig) -> None:
    sampling, line = served_sampling(model, {})
    assert sampling == SamplingConfig()
    assert line.endswith(f"{model.path} has no {FILE}")
    advise(model, {"eos_token_id": 3})
    sampling, line = served_sampling(model, {})
    assert sampling == SamplingConfig()
    assert f"{FILE} has no other key of it; no top_k there: all ids, where" in line


def test_ids_that_nothing_cuts_are_said_where_transformers_would_cut_them(
    model: TargetConfig,
) -> None:
    said = "no top_k there: all ids"
    for content, given, expected in (
        ({"temperature": 0.6}, {}, True),
        ({"temperature": 0.6}, {"top_k": 0}, False),
        ({"temperature": 0.6, "top_k": 20}, {}, False),
        ({"do_sample": False}, {}, False),
    ):
        advise(model, content)
        assert (said in served_sampling(model, given)[1]) == expected


# Each key alone, with a value under which `generate` gives other tokens.
EFFECTIVE: dict[str, Any] = {
    "suppress_tokens": [65],
    "begin_suppress_tokens": [0],
    "bad_words_ids": [[3]],
    "sequence_bias": [[[3], 2.0]],
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "min_length": 5,
    "min_new_tokens": 5,
    "max_new_tokens": 9,
    "max_length": 9,
    "max_time": 1.5,
    "stop_strings": ["a"],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 0,
    "exponential_decay_length_penalty": [3, 1.1],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "token_healing": True,
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    **dict.fromkeys(("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), 0.3),
}
NEUTRAL: dict[str, Any] = GenerationConfig._get_default_generation_params() | {
    "guidance_scale": 1.0,
    "suppress_tokens": [],
    "stop_strings": [],
    "min_p": 0.0,
    "penalty_alpha": 0.0,
    "token_healing": False,
    "renormalize_logits": True,
    "num_assistant_tokens": 7,
    "use_cache": False,
    "output_logits": True,
    "chat_format": "chatml",  # of others
}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        *(({key: value}, [key]) for key, value in EFFECTIVE.items()),
        *(({key: value}, []) for key, value in NEUTRAL.items()),
        (dict.fromkeys(EFFECTIVE), []),
        ({"min_p": 0.3, "suppress_tokens": [1], "do_sample": False}, ["suppress_tokens"]),
        ({"length_penalty": 2.0, "early_stopping": True}, []),
        ({"length_penalty": 2.0, "num_beams": 3}, ["length_penalty", "num_beams"]),
    ],
)
def test_keys_that_generate_obeys_and_nothing_serves_are_named(
    model: TargetConfig, content: dict[str, Any], named: list[str]
) -> None:
    advise(model, QWEN | content)
    line = served_sampling(model, {})[1]
    assert unserved(content) == named
    assert "\n" not in line
    assert ("not served" in line) == bool(named)
    assert line.endswith(", ".join(named))


def test_every_key_of_transformers_is_served_or_named_but_for_how_it_computes() -> None:
    """A key that a release adds is named until somebody says that it changes nothing."""
    every = {name: 1.5 for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert set(EFFECTIVE) <= set(unserved(every))
    assert unserved(GenerationConfig._get_default_generation_params()) == []


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ("{not json", r"^sampling\.from=model: cannot read generation_config\.json of target\.pa"),
        ("[1, 2]", r"^sampling\.from=model: cannot read generation_config\.json of target\.pa"),
        (
            {"temperature": "hot"},
            r"json: temperature is 'hot': correct it, or give sampling\.",
        ),
        ({"top_k": 2.5}, r"json: top_k is 2\.5: correct it, or give sampling\.top_k="),
        ({"top_k": True}, r"json: top_k is True"),
        ('{"top_k": NaN}', r"json: top_k is nan"),
        (
            {"top_p": 1.5},
            r"json: sampling\.top_p must be in \[1e-06, 1\], got 1\.5 \([^()]+\): correct it, or",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name_in_one_line(
    model: TargetConfig, content: Any, refusal: str
) -> None:
    advise(model, content)
    with pytest.raises(ValueError, match=refusal) as error:
        served_sampling(model, {})
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"^target\.path \./nowhere: no such folder"):
        served_sampling(TargetConfig(path="./nowhere"), {})
