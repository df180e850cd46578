"""An update learns from what was served, asks the gate, and can be interrupted anywhere."""

import dataclasses
from collections import Counter

import pytest
import torch

from draftkit.online import refit as refit_module
from draftkit.online.refit import Anchors
from draftkit.online.registry import Registry
from pipelines.online import summary_of
from tests.online import making
from tests.online.shop import SETTINGS, Shop, entries, make_trainer


@pytest.fixture(scope="module")
def records():
    return making.traffic(120)


@pytest.fixture
def shop(tmp_path, records):
    made = Shop(tmp_path, records[:60])
    yield made
    made.buffer.close()


@pytest.fixture
def collated(monkeypatch):
    """The rows that updates have trained on, in order."""
    rows, collate = [], refit_module.collate

    def watched(some, **options):
        rows.extend(some)
        return collate(some, **options)

    monkeypatch.setattr(refit_module, "collate", watched)
    return rows


def test_an_update_that_learns_is_published(shop):
    assert shop.refit.due()
    before = shop.weights()
    update = shop.refit.update()
    assert update.version == "v000002"
    assert update.verdict.gain.low > 0
    verdict = update.verdict
    assert verdict.after.mean - verdict.before.mean == pytest.approx(verdict.gain.mean)
    current = shop.registry.current()
    assert current.name == "v000002"
    assert current.parent == "v000001"
    assert current.metrics["gain"]["mean"] == update.verdict.gain.mean
    assert any(not torch.equal(before[name], weight) for name, weight in shop.weights().items())
    assert not shop.refit.due()  # nothing new


def test_what_is_known_of_a_version_comes_from_records_after_the_gate_that_chose_it(shop, records):
    """Those of the gate were high for the very weights that passed, so they are left out."""
    assert shop.refit.update().version == "v000002"
    state, base = shop.refit.state, shop.registry.current()
    assert "v000002" not in state["alphas"]
    assert summary_of([shop.refit])["alpha_by_version"] == {"default/v000002": None}
    seen = shop.buffer.newest("default", 999, held_out=True)
    shop.buffer.append(entries(records[60:]))
    shop.refit.update()
    stored = shop.buffer.newest("default", SETTINGS.gate.records, held_out=True)
    fresh = [record for record in stored if record not in seen]
    assert 20 <= len(fresh) < len(stored)
    alphas = []
    for name in ("v000001", "v000002"):
        weights = shop.registry.read(shop.registry.version(name))
        alphas.append(shop.refit.judge.score(weights, fresh).alpha)
    assert state["alphas"]["v000002"] == alphas[1].as_dict()
    assert base.metrics["gain"]["mean"] != alphas[1].mean - alphas[0].mean


def test_it_waits_for_records_and_for_a_gate_that_can_judge(tmp_path, records):
    shop = Shop(tmp_path)
    assert not shop.refit.due()
    held_out = 0
    for count in range(0, 120, 4):
        shop.buffer.append(entries(records[count : count + 4]))
        held_out = shop.buffer.count("default", held_out=True)
        fresh = shop.buffer.count("default", held_out=False)
        assert shop.refit.due() == (fresh >= 16 and held_out >= 20)
    assert held_out >= 20


def test_many_answers_to_few_prompts_are_no_gate(tmp_path, records):
    """16 answers to each of 8 held-out prompts: texts of one prompt are one observation."""
    shop = Shop(tmp_path, records[:60])
    few = shop.buffer.newest("default", 8, held_out=True)
    shop.buffer.append(
        entries([dataclasses.replace(one, row=row) for row in range(16) for one in few])
    )
    assert shop.buffer.count("default", held_out=True) > 128
    assert not shop.refit.due()
    shop.buffer.append(entries(records[60:]))
    assert shop.refit.due()


def test_each_gate_of_a_version_asks_for_more(shop, records, monkeypatch):
    asked = []

    def refusing(**scores):
        asked.append(scores["gate"])
        return dataclasses.replace(judged(**scores), publish=False, reason="test")

    judged = refit_module.judge
    monkeypatch.setattr(refit_module, "judge", refusing)
    for _ in range(3):
        shop.refit.update()
    monkeypatch.setattr(refit_module, "judge", judged)
    shop.refit.state["gates"]["v000001"] = 0
    assert shop.refit.update().version == "v000002"
    monkeypatch.setattr(refit_module, "judge", refusing)
    shop.refit.update()
    assert asked == [1, 2, 3, 1]
    assert shop.refit.state["gates"] == {"v000001": 1, "v000002": 1}


def test_prompts_of_the_gate_are_never_trained_on(shop, collated):
    shop.refit.update()
    seen = {tuple(row.token_ids) for row in collated}

    def texts(held_out):
        found = shop.buffer.newest("default", 1000, held_out=held_out)
        return {(*record.prompt_ids, *record.output_ids) for record in found}

    assert seen <= texts(False)
    assert not seen & texts(True)
    assert len(seen) > 20


def test_rows_are_recent_older_and_anchors_in_their_shares(tmp_path, records, collated):
    shop = Shop(tmp_path, records[:100], anchors=Anchors(train=records[100:110]))
    newest = shop.buffer.newest("default", SETTINGS.recent, held_out=False)
    recent = {tuple(record.output_ids) for record in newest}
    anchors = {tuple(record.output_ids) for record in records[100:110]}
    shop.refit.update()
    kinds: Counter[str] = Counter()
    for row in collated:
        output = tuple(t for t, made in zip(row.token_ids, row.generated, strict=True) if made)
        kinds["anchor" if output in anchors else "recent" if output in recent else "old"] += 1
    assert kinds == {"recent": 4 * 6, "old": 2 * 6, "anchor": 2 * 6}


def test_a_restart_goes_on_where_the_last_update_ended(tmp_path, records):
    """Two updates in one process give the very weights of two processes."""
    found = []
    for name, restarts in (("whole", False), ("halves", True)):
        folder = tmp_path / name
        folder.mkdir()
        shop = Shop(folder, records[:60])
        shop.refit.update()
        if restarts:
            shop.buffer.close()
            shop = Shop(folder)
        shop.buffer.append(entries(records[60:]))
        update = shop.refit.update()
        assert update.number == 1
        assert [one["update"] for one in shop.refit.state["decisions"]] == [0, 1]
        found.append((shop.weights(), update.tokens, update.verdict))
        shop.buffer.close()
    (whole, *rest), (halves, *others) = found
    assert rest == others
    for name, weight in whole.items():
        assert torch.equal(weight, halves[name]), name


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_an_update_that_is_given_up_changes_nothing(shop, steps):
    calls = []

    def hold():
        if len(calls) == steps:
            raise RuntimeError("stop")
        calls.append(1)

    with pytest.raises(RuntimeError):
        shop.refit.update(hold)
    assert shop.registry.names() == ["v000001"]
    assert shop.refit.state["update"] == 0
    assert shop.refit.due()
    fresh = make_trainer(shop.registry.current().path)
    for (name, weight), (_, own) in zip(
        shop.refit._working().trained(), fresh.trained(), strict=True
    ):
        assert torch.equal(weight, own), name


def test_an_update_that_is_refused_makes_the_next_one_wait(shop, records, monkeypatch):
    refuse(monkeypatch)
    assert shop.refit.wanted == 16
    shop.refit.update()
    assert shop.refit.wanted == 32
    assert shop.refit.state["base"] == "v000001"
    trained, base = shop.refit._working().draft.weights(), shop.weights()
    assert any(not torch.equal(trained[name], base[name]) for name in base)  # it goes on with them
    shop.buffer.append(entries(records[60:100]))
    assert 16 <= shop.refit.new_records() < 32
    assert not shop.refit.due()


def test_the_wait_doubles_with_each_refusal_up_to_sixteen_times(shop, monkeypatch):
    with monkeypatch.context() as patch:
        refuse(patch)
        waits = []
        for _ in range(6):
            shop.refit.update()
            waits.append(shop.refit.wanted)
    assert waits == [32, 64, 128, 256, 256, 256]
    refuse(monkeypatch, publish=True)
    shop.refit.update()
    assert shop.refit.wanted == 16


def refuse(monkeypatch, publish=False):
    """Let the gate answer as it is told."""
    judged = refit_module.judge

    def told(**scores):
        return dataclasses.replace(judged(**scores), publish=publish, reason="test")

    monkeypatch.setattr(refit_module, "judge", told)


def test_weights_that_have_forgotten_are_left(tmp_path, records):
    """No anchor may lose anything here: the gate refuses, and training begins again."""
    gate = dataclasses.replace(SETTINGS.gate, anchor_tolerance=0.0, anchors=8)
    foreign = [
        dataclasses.replace(
            record, topk_ids=[[(i + 7) % 250 for i in ids] for ids in record.topk_ids]
        )
        for record in records[110:]
    ]  # by these scores every step towards the target is a loss, or none
    shop = Shop(tmp_path, records[:60], anchors=Anchors(held_out=foreign), gate=gate)
    trained = make_trainer(shop.registry.current().path)
    update = shop.refit.update()
    assert update.version is None
    assert update.verdict.reason.startswith("anchors")
    for (name, weight), (_, fresh) in zip(
        shop.refit._working().trained(), trained.trained(), strict=True
    ):
        assert torch.equal(weight, fresh), name


def test_low_rank_updates_are_published_as_plain_weights(tmp_path, records, monkeypatch):
    refuse(monkeypatch, publish=True)
    shop = Shop(tmp_path, records[:60], lora=4)
    plain = set(shop.weights())
    names = {name for name, _ in make_trainer(shop.registry.current().path, lora=4).trained()}
    assert all("lora" in name for name in names)
    before = shop.weights()
    assert shop.refit.update().version == "v000002"
    after = shop.weights()
    assert set(after) == plain
    assert any(not torch.equal(before[name], after[name]) for name in plain)


def test_prompts_are_learned_from_where_asked(tmp_path, records, collated):
    for prompts in (False, True):
        shop = Shop(tmp_path / str(prompts), records[:60], prompts=prompts)
        tokens = shop.refit.update().tokens
        given = {
            tuple(record.prompt_ids + record.output_ids): len(record.prompt_ids)
            for record in records
        }
        for row in collated:
            first = 1 if prompts else given[tuple(row.token_ids)]
            assert row.generated.index(True) == first
            assert all(row.generated[first:])
        assert tokens == sum(sum(row.generated) for row in collated)
        collated.clear()
        shop.buffer.close()


def test_without_a_version_there_is_nothing_to_refit(tmp_path, records):
    shop = Shop(tmp_path, records[:60])
    empty = Registry(tmp_path / "others")
    shop.refit.registry = empty
    with pytest.raises(ValueError, match="no drafter is published"):
        shop.refit.due()
