"""How the refit of a route learns: each update is a run of its own."""

from dataclasses import replace

from draftkit.config import Config, OnlineConfig, OptimConfig
from draftkit.online.assembly import optim_of_update


def test_the_rate_falls_to_zero_in_every_update_without_a_warm_up() -> None:
    optim = OptimConfig(max_steps=900, warmup_steps=40, learning_rate=3e-4)
    config = Config(optim=optim, online=OnlineConfig(steps=17))
    expected = replace(optim, max_steps=17, warmup_steps=0, lr_scheduler_type="linear")
    assert optim_of_update(config) == expected
