"""Cards state what was measured, and what they tell people to run does run."""

import json

import pytest
import torch

from draftkit.engines.launch import model_card
from draftkit.models.head_files import P_EAGLE
from draftkit.models.heads import EAGLE3, MEDUSA
from draftkit.models.loading import save_model
from tests import tiny
from tests.evaluation.test_page import judged


def card_of(one, *, target="some/target", kind="plain", **more):
    return model_card(one, target=target, name="chats", kind=kind, **more)


@pytest.fixture
def card():
    return card_of(judged())


def test_a_card_begins_with_what_the_hub_reads_and_names_target_and_experiment(card):
    _, head, body = card.split("---\n", 2)
    assert 'base_model: "some/target"' in head.splitlines()
    assert "of the experiment chats" in body
    for text in ("1.38×** [1.33, 1.43]", "+0.135", "a CPU, 2 cores", "**DEPLOY.**"):
        assert text in body


def test_a_card_names_no_folder_of_the_machine_that_wrote_it(tmp_path):
    (tmp_path / "model.gguf").touch()
    for own in (None, str(tmp_path), f"{tmp_path}/model.gguf"):  # the hub can link none
        for text in (card_of(judged(), target=own), card_of(None, target=own)):
            assert "base_model" not in text
            assert str(tmp_path) not in text
            assert "its target verifies" in text


def test_a_drafter_that_was_not_judged_states_no_number():
    text = card_of(None, gamma=3)
    assert "has not been measured" in text
    assert "| alpha" not in text
    assert '"num_speculative_tokens": 3' in text


def test_a_card_launches_engines_that_draft_by_argmax_with_a_gamma_of_their_own():
    modes = {"alpha": 5, "alpha_greedy_draft": 0, "alpha_exact_match": 0}
    text = card_of(judged(best_gamma_by_mode=modes))
    assert "not to speculate: vLLM 5, SGLang 0, llama.cpp 0, transformers 5.\n" in text
    (line,) = (line for line in text.splitlines() if "--speculative-config" in line)
    assert line.startswith("    vllm serve some/target ")
    options = json.loads(line.partition("'")[2].rpartition("'")[0])
    assert (options["model"], options["num_speculative_tokens"]) == ("DRAFT", 5)
    assert "--speculative-num-steps 1" in text
    assert "--speculative-num-draft-tokens 2" in text
    assert "--spec-draft-n-max 1" in text
    assert "num_assistant_tokens = 5" in text


def test_a_card_of_a_head_names_the_engines_that_load_it():
    for kind, engines in ((EAGLE3, ["vLLM", "SGLang", "llama.cpp"]), (P_EAGLE, ["vLLM"])):
        for one in (judged(kind=kind), None):
            text = card_of(one, target=None, kind=kind)
            lines = [line for line in text.splitlines() if line.endswith(":")]
            assert [line.split(",")[0].removesuffix(":") for line in lines] == engines
            assert '"method": "eagle3"' in text
    assert "No engine loads Medusa heads any more" in card_of(None, kind=MEDUSA)


@torch.inference_mode()
def test_the_lines_for_transformers_run(tmp_path, capsys):
    target = tiny.model()
    for name, model in (("target", target), ("draft", tiny.related(target))):
        save_model(model, tiny.byte_tokenizer(), tmp_path / name)
    code = card_of(None, target=None).partition("```python\n")[2].partition("```")[0]
    for name in ("target", "draft"):
        code = code.replace(f'"{name.upper()}"', repr(f"{tmp_path}/{name}"))
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")
