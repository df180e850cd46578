"""The sampling of a generation_config.json: its keys, what is not there, and bad files."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import SamplingConfig, TargetConfig
from draftkit.models.served import FILE, served_sampling

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
        ({"top_p": 1.5}, r"json: sampling\.top_p must lie in \(0, 1\], got 1\.5: correct it, or"),
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
