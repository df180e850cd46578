"""`python -m tests.soak [COMMIT]`: the suites at full counts; of a commit, the share that it picks.

Without a commit every test marked `soak` runs. A commit picks tests by its hash, as many as fit
into `SHARE_MINUTES`, so that over some commits all of them run though none waits for all. A share
that comes to its limit is stopped, which is said and is no failure: a loud machine says nothing
about the change. A test that fails is one; those that are bound by a clock (`TIMED`) get a second
run first, alone.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARE_MINUTES = 25.0  # of the clock, on a slow machine
ALONE_MINUTES = 10.0  # for the second run of what failed
WORKERS = 2  # that a share is made for
FILLED = 0.7  # of the time of all workers
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "load")
MARKED = "soak and not gpu and not engines"
# Files whose tests compare times, which others on the machine disturb.
TIMED = (
    "tests/serving/test_api_soak.py",
    "tests/serving/test_engine_load.py",
)
# About how many minutes each test takes of one of two slow cores, all its cases together.
# Most were reckoned from the processor time of one case.
_MINUTES = {
    "data/test_store": {
        "test_text_larger_than_memory_is_split_and_tokenised": 1.4,
    },
    "decoding/test_exactness": {
        "test_the_joint_law_is_the_targets_everywhere": 3.0,
        "test_the_joint_law_is_the_targets_everywhere_whoever_proposes": 3.9,
        "test_two_hundred_thousand_rows_have_the_targets_law": 12.1,
        "test_two_hundred_thousand_rows_have_the_targets_law_under_other_rules": 3.7,
        "test_two_hundred_thousand_rows_have_the_targets_law_whoever_proposes": 7.7,
    },
    "decoding/test_graphs": {
        "test_machine_code_of_every_kind": 6.4,
        "test_weights_opened_to_training_are_read_anew_by_machine_code_and_go_with_the_target": 0.2,
    },
    "decoding/test_parallel": {"test_two_hundred_thousand_rows_have_the_targets_law": 3.0},
    "decoding/test_pieces": {"test_pieces_as_machine_code_give_what_eager_code_gives": 1.5},
    "decoding/test_memory": {
        "test_generations_by_graphs_leave_nothing_behind": 0.6,
        "test_generations_by_machine_code_leave_nothing_behind": 0.6,
        "test_generations_leave_nothing_behind": 2.1,
        "test_the_peak_of_compiled_decoding_is_weights_and_caches_and_little_else": 3.1,
    },
    "decoding/test_round": {
        "test_compiled_rounds_of_every_proposer_are_its_own": 0.2,
        "test_compiled_rounds_read_encoders_of_every_size": 0.2,
    },
    "evaluation/test_lossless": {
        "test_in_bfloat16_thirty_sound_runs_pass_and_lossy_ones_fail": 1.6,
    },
    "evaluation/test_predictions": {
        "test_predictions_are_what_decoding_shows": 3.0,
    },
    "evaluation/test_simulated": {
        "test_intervals_hold_the_truth_in_every_cell": 4.0,
        "test_of_many_ways_that_gain_nothing_at_most_three_in_a_hundred_are_named": 34.0,
    },
    "experiments/test_serve_and_refit": {
        "test_each_route_is_served_recorded_and_refitted_by_itself": 0.8,
    },
    "models/test_embedded": {
        "test_at_least_half_of_sampled_statements_parse": 0.3,
    },
    "online/test_faults": {
        "test_a_kill_at_any_moment_leaves_a_registry_that_works": 0.2,
        "test_a_kill_during_the_seed_leaves_a_registry_that_is_seeded_again": 0.1,
        "test_a_reader_goes_on_while_writers_are_killed_beside_it": 0.1,
        "test_acknowledged_records_survive_every_kill": 0.8,
    },
    "online/test_gate": {
        "test_of_many_streams_at_most_one_in_twenty_lets_an_equal_drafter_through": 2.5,
    },
    "serving/test_api_soak": {
        "test_a_thousand_idle_connections_do_not_stop_service": 0.1,
        "test_slow_readers_cost_little_and_hold_nobody_up": 0.1,
        "test_ten_thousand_requests_leave_no_memory_behind": 2.1,
    },
    "serving/test_engine_law": {
        "test_served_text_has_the_targets_law_in_fifty_thousand_answers": 3.3,
    },
    "serving/test_engine_load": {
        "test_a_swap_holds_the_rounds_for_less_than_one_of_them": 0.4,
        "test_many_clients_are_served_at_twice_the_rate_of_one_and_fairly": 1.5,
        "test_recording_costs_at_most_three_hundredths_of_the_processor": 1.0,
        "test_who_joins_last_first_is_not_fair": 0.1,
    },
    "serving/test_hostile": {
        "test_many_bodies_by_the_openapi_description": 2.1,
    },
    "test_chats": {
        "test_ids_are_those_of_the_template_from_the_data_to_the_server": 0.4,
    },
    "test_node8": {
        "test_eight_processes_train_as_one_that_accumulates": 2.0,
    },
    "test_notebooks": {
        "test_a_notebook_runs_and_shows_what_it_promises": 1.1,
    },
    "test_service_kill": {
        "test_a_daemon_killed_anywhere_leaves_whole_versions": 2.0,
        "test_a_server_killed_anywhere_keeps_what_it_acknowledged": 0.7,
    },
    "test_stage_kill": {
        "test_a_kill_at_any_moment_leaves_a_folder_that_the_next_launch_finishes": 1.5,
    },
    "theory/test_verification": {
        "test_the_joint_law_holds_over_many_random_tables": 2.7,
        "test_the_p_values_of_repetitions_are_uniform": 4.7,
    },
    "models/test_kept_ids": {
        "test_compiled_rounds_are_the_eager_ones_before_and_after_new_weights": 0.2,
    },
    "models/test_sharding": {
        "test_a_process_never_holds_more_than_its_part_and_a_layer": 0.4,
    },
    "test_check": {
        "test_every_stage_runs_below_a_folder_of_its_own_and_nothing_stays": 0.4,
    },
    "test_check_limits": {
        "test_what_is_refused_fails_and_what_is_allowed_runs": 4,
        "test_the_dry_run_says_what_the_run_then_takes": 6,
    },
    "test_main": {
        "test_an_installation_plans_what_the_clone_plans_and_writes_nothing_into_itself": 0.4,
    },
    "test_api": {
        "test_checking_identity_holds_one_copy_of_the_target": 0.4,
        "test_distilling_holds_one_copy_of_the_target": 0.4,
    },
}
MINUTES = {
    f"tests/{file}.py::{name}": minutes
    for file, tests in _MINUTES.items()
    for name, minutes in tests.items()
}


def share(commit: str, minutes: float = SHARE_MINUTES) -> list[str]:
    """The tests that `commit` picks: in the order of a hash of both, as long as they fit.

    A part of the time is kept back: at the end one worker waits for the other.
    """
    order = sorted(MINUTES, key=lambda test: hashlib.sha256(f"{commit} {test}".encode()).digest())
    left, picked = FILLED * WORKERS * minutes, []
    for test in order:
        if MINUTES[test] <= left:
            picked.append(test)
            left -= MINUTES[test]
    return sorted(picked)


def run(words: Sequence[str], cache: Path, minutes: float | None) -> int | None:
    """The exit code of pytest with `words`; None if it was stopped after `minutes`.

    What failed lies in `cache`, also of a run that was stopped.
    """
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-m", MARKED]
    command += ["-o", f"cache_dir={cache}", *words]
    # A shell's background job ignores interrupts, and so would pytest.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        return process.wait(minutes and 60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # lets pytest write down what has failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failures(cache: Path) -> list[str]:
    """The tests that failed, by the ids of pytest."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def soak(tests: Sequence[str], minutes: float | None, workers: Sequence[str]) -> int:
    """Run `tests` for at most `minutes`; the exit code of it all."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        code = run([*workers, *tests], cache, minutes)
        failed = failures(cache)
        if code is None:
            say(f"stopped after {minutes:g} minutes, which is no failure; not all of it was run")
            code = int(bool(failed))
        if code != 1 or any(test.split("::")[0] not in TIMED for test in failed):
            return code
        say(f"once more, alone, since other work disturbs a clock: {' '.join(failed)}")
        code = run(["-n", "0", *failed], cache, ALONE_MINUTES)
    return 1 if code is None else code


def say(text: str) -> None:
    """Write a line at once, between those of pytest."""
    sys.stdout.write(f"soak: {text}\n")
    sys.stdout.flush()


def main(commit: str | None = None) -> int:
    """The share of `commit`, or all."""
    if commit is None:
        return soak([], None, SIDE_BY_SIDE)
    picked = share(commit)
    say(f"commit {commit} picks {len(picked)} of {len(MINUTES)} tests")
    return soak(picked, SHARE_MINUTES, SIDE_BY_SIDE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
