"""Cards state what was measured, and what they tell people to run does run."""

import json

import pytest
import torch

from draftkit.evaluation.cards import SERVED, model_card, plain_card, serving
from draftkit.models.head_files import P_EAGLE
from draftkit.models.heads import EAGLE3, MEDUSA
from draftkit.models.loading import save_model
from tests import tiny
from tests.evaluation.test_decision import judged


@pytest.fixture
def card():
    return model_card(judged(), target="some/target", name="chats")


def test_a_card_begins_with_what_the_hub_reads_and_names_target_and_experiment(card):
    _, head, body = card.split("---\n", 2)
    assert 'base_model: "some/target"' in head.splitlines()
    assert "of the experiment chats" in body
    for text in ("1.38×** [1.33, 1.43]", "+0.135", "a CPU, 2 cores", "**DEPLOY.**"):
        assert text in body


def test_a_card_names_no_folder_of_the_machine_that_wrote_it(tmp_path):
    (tmp_path / "model.gguf").touch()
    for own in (None, str(tmp_path), f"{tmp_path}/model.gguf"):  # the hub can link none
        cards = model_card(judged(), target=own, name="a"), plain_card(own, 3)
        for text in cards:
            assert "base_model" not in text
            assert str(tmp_path) not in text
            assert "its target verifies" in text


def test_a_drafter_that_was_not_judged_states_no_number():
    text = plain_card("some/target", 3)
    assert "has not been measured" in text
    assert "| alpha" not in text
    assert '"num_speculative_tokens": 3' in text


def test_commands_for_engines_hold_both_models_and_the_gamma_of_each():
    gammas = {"vllm": 3, "sglang": 2, "llamacpp": 1, "hf": 4}
    text = serving("the/target", "the/draft", gammas)
    (line,) = (line for line in text.splitlines() if "--speculative-config" in line)
    options = json.loads(line.partition("'")[2].rpartition("'")[0])
    assert options["model"] == "the/draft"
    assert options["num_speculative_tokens"] == 3
    assert "--speculative-num-steps 2" in text
    assert "--speculative-num-draft-tokens 3" in text
    assert "--spec-draft-n-max 1" in text
    assert "num_assistant_tokens = 4" in text


def test_a_card_launches_engines_that_draft_by_argmax_with_a_gamma_of_their_own():
    modes = {"alpha": 5, "alpha_greedy_draft": 0, "alpha_exact_match": 0}
    one = judged(best_gamma_by_mode=modes)
    text = model_card(one, target="some/target", name="chats")
    assert "not to speculate: vLLM 5, SGLang 0, llama.cpp 0, transformers 5.\n" in text
    assert '"num_speculative_tokens": 5' in text
    assert "--speculative-num-steps 1" in text
    assert "--spec-draft-n-max 1" in text


def test_a_card_of_a_head_names_the_engines_that_load_it():
    for kind, engines in ((EAGLE3, ["vLLM", "SGLang", "llama.cpp"]), (P_EAGLE, ["vLLM"])):
        for text in (
            model_card(judged() | {"kind": kind}, target=None, name="a"),
            plain_card(None, 3, kind=kind),
        ):
            lines = [line for line in text.splitlines() if line.endswith(":")]
            assert [line.split(",")[0].removesuffix(":") for line in lines] == engines
            assert '"method": "eagle3"' in text
    assert "No engine loads Medusa heads any more" in plain_card(None, 3, kind=MEDUSA)


@torch.inference_mode()
def test_the_lines_for_transformers_run(tmp_path, capsys):
    target = tiny.model()
    for name, model in (("target", target), ("draft", tiny.related(target))):
        save_model(model, tiny.byte_tokenizer(), tmp_path / name)
    code = (
        serving(f"{tmp_path}/target", f"{tmp_path}/draft", dict.fromkeys(SERVED, 2))
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")
