"""Files of texts: which steps share one, how long it stays, and what is said when it is gone."""

from dataclasses import replace

import pytest

from draftkit.config import OptimConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.batch_sources import RolloutFiles


def files_of(folder, refresh_steps, *, save_steps=4, max_steps=40, **options):
    optim = OptimConfig(save_steps=save_steps, max_steps=max_steps)
    return RolloutFiles(folder=folder, refresh_steps=refresh_steps, optim=optim, **options)


def record(row):
    return Record(
        prompt_ids=[1],
        output_ids=[row],
        sampler="draft",
        sampler_version="step 0",
        sampling={"temperature": 1.0},
        seed=0,
        row=row,
    )


@pytest.mark.parametrize("refresh_steps", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("save_steps", [1, 4, 10])
def test_what_a_checkpoint_may_come_back_to_is_there_and_little_else(
    tmp_path, refresh_steps, save_steps
):
    files = files_of(tmp_path, refresh_steps, save_steps=save_steps)
    checkpoint = 0
    for step in range(40):
        if files.block(step).start == step:
            files.write(step, [record(step)])
        for back in (checkpoint, step):
            assert files.read(back)[0].row == back - back % refresh_steps
        names = [path.name for path in tmp_path.iterdir()]
        assert len(names) <= save_steps / refresh_steps + 2
        if (step + 1) % save_steps == 0:
            checkpoint = step + 1


def test_blocks_follow_each_other_and_end_with_the_run(tmp_path):
    files = files_of(tmp_path, 3, max_steps=8)
    blocks = [range(3)] * 3 + [range(3, 6)] * 3 + [range(6, 8)] * 2
    assert [files.block(step) for step in range(8)] == blocks


def test_processes_that_train_together_keep_files_of_their_own(tmp_path):
    first, second = (replace(files_of(tmp_path, 2), suffix=suffix) for suffix in ("-0", "-1"))
    first.write(0, [record(0)])
    second.write(0, [record(1)])
    assert (first.read(1), second.read(1)) == ([record(0)], [record(1)])
    last = first.optim.save_steps * 3
    first.write(last, [record(2)])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        path.name for path in (first.path(last), second.path(0))
    )


def test_a_damaged_file_is_named_with_the_way_out(tmp_path):
    files = files_of(tmp_path, 2)
    files.path(2).write_bytes(b"half a file")
    with pytest.raises(
        ValueError, match=r"step-00000002\.parquet.*step 3.*overwrite=true"
    ) as error:
        files.read(3)
    assert "\n" not in str(error.value)
