"""Counting steps, going on, and what is left after an exception."""

from typing import Any

import numpy as np
import pytest
from counter_environment import check_lanes, makers, numbers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import GymEnvironment, suite_gym
from diskbuf.errors import ClosedError, OptionError, SpecError
from diskbuf.policies import Policy, RandomPolicy
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory

modes = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


def counter(
    lengths: list[tuple[int, ...]], mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any
) -> GymEnvironment:
    return suite_gym.wrap(SyncVectorEnv(makers(lengths, **kwargs), autoreset_mode=mode))


def random_policy(env: GymEnvironment, seed: int = 0) -> RandomPolicy:
    return RandomPolicy(env.time_step_spec(), env.action_spec(), seed=seed)


def steps_in(rows: list[Trajectory]) -> int:
    return sum(int(np.count_nonzero(~row.is_boundary())) for row in rows)


def test_ten_environments_and_fifty_steps_are_five_rows_of_ten() -> None:
    rows: list[Trajectory] = []
    with counter([(9,)] * 10) as env:
        DynamicStepDriver(env, random_policy(env), [rows.append], 50).run()
    assert [row.reward.shape for row in rows] == [(10,)] * 5


@modes
def test_boundaries_are_shown_but_not_counted(mode: AutoresetMode) -> None:
    rows: list[Trajectory] = []
    with counter([(3,), (5,)], mode) as env:
        DynamicStepDriver(env, random_policy(env), [rows.append], num_steps=32).run()
    # In 20 rows the first lane has 5 boundaries and the second one 3.
    assert len(rows) == 20
    assert check_lanes(rows, [(3,), (5,)]) == [15, 17]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    num_steps=st.integers(1, 30),
)
def test_a_run_ends_with_the_row_that_reaches_the_count(lengths: list[int], num_steps: int) -> None:
    rows: list[Trajectory] = []
    own_lengths = [(length,) for length in lengths]
    with counter(own_lengths) as env:
        DynamicStepDriver(env, random_policy(env), [rows.append], num_steps).run()
    check_lanes(rows, own_lengths)
    assert steps_in(rows[:-1]) < num_steps <= steps_in(rows) < num_steps + len(lengths)


@modes
def test_many_short_runs_are_one_long_one(mode: AutoresetMode) -> None:
    def rows_of(*, runs: int, passes_time_step: bool) -> list[Trajectory]:
        rows: list[Trajectory] = []
        with counter([(3,), (5,)], mode) as env:
            driver = DynamicStepDriver(env, random_policy(env), [rows.append], num_steps=40 // runs)
            time_step, policy_state = driver.run()
            for _ in range(runs - 1):
                time_step, policy_state = driver.run(time_step if passes_time_step else None, policy_state)
                assert time_step is env.current_time_step()
        return rows

    expected = rows_of(runs=1, passes_time_step=True)
    for runs in (5, 40):
        for passes_time_step in (False, True):
            rows = rows_of(runs=runs, passes_time_step=passes_time_step)
            assert len(rows) >= len(expected)  # a short run may take a step more than it was asked for
            for row, other in zip(expected, rows, strict=False):
                for field, other_field in zip(row, other, strict=True):
                    np.testing.assert_array_equal(field, other_field)


def test_observers_see_each_row_in_their_order() -> None:
    seen: list[tuple[str, Trajectory]] = []
    with counter([(3,)]) as env:
        observers = [lambda row: seen.append(("a", row)), lambda row: seen.append(("b", row))]
        driver = DynamicStepDriver(env, random_policy(env), observers, num_steps=2)
        driver.run()
        assert driver.observers == tuple(observers)
    assert [name for name, _ in seen] == ["a", "b", "a", "b"]
    assert seen[0][1] is seen[1][1]
    assert seen[1][1] is not seen[2][1]


def test_rows_stay_as_they_were_shown() -> None:
    rows: list[Trajectory] = []
    with counter([(3,), (2,)], reuses_array=True) as env:
        DynamicStepDriver(env, random_policy(env), [rows.append], num_steps=20).run()
    check_lanes(rows, [(3,), (2,)])


def test_without_observers_it_only_steps() -> None:
    with counter([(3,)]) as env:
        time_step, policy_state = DynamicStepDriver(env, random_policy(env), num_steps=2).run()
    assert numbers(time_step.observation)[0, 2] == 2
    assert policy_state == ()


class Counting(Policy):
    """Plays what it has counted, and tells it as info."""

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        return PolicyStep(policy_state.astype(np.int64), policy_state + 1, {"count": policy_state})


def test_the_policys_state_goes_from_call_to_call_and_its_info_into_the_row() -> None:
    rows: list[Trajectory] = []
    spec = ArraySpec((), np.int32)
    with counter([(9,), (9,)]) as env:
        policy = Counting(env.time_step_spec(), env.action_spec(), policy_state_spec=spec, info_spec={"count": spec})
        driver = DynamicStepDriver(env, policy, [rows.append], num_steps=4)
        time_step, policy_state = driver.run()
        driver.run(time_step, policy_state)
        driver.run(time_step=None, policy_state=None)  # begins with the initial state again
    assert [row.action.tolist() for row in rows] == [[0, 0], [1, 1], [2, 2], [3, 3], [0, 0], [1, 1]]
    assert [row.policy_info["count"].tolist() for row in rows[:2]] == [[0, 0], [1, 1]]


@modes
def test_an_exception_in_the_environment_leaves_whole_rows_and_the_next_run_begins_an_episode(
    mode: AutoresetMode,
) -> None:
    rows: list[Trajectory] = []
    lengths = [(5,), (4,)]
    with counter(lengths, mode, fails_at=(1, 2)) as env:
        driver = DynamicStepDriver(env, random_policy(env), [rows.append], num_steps=12)
        state = driver.run()
        with pytest.raises(RuntimeError, match="fails in episode 1 at 2"):
            driver.run(*state)
        before = len(rows)
        check_lanes(rows, lengths)
        for _ in range(5):
            state = driver.run(*state)  # the time step from before the exception
    assert rows[before].is_first().all()
    check_lanes(rows[before:], lengths, skips_episodes=True)


def test_an_exception_in_an_observer_leaves_no_two_rows_that_do_not_belong_together() -> None:
    rows: list[Trajectory] = []
    calls = 0

    def full_once(row: Trajectory) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no space left")
        rows.append(row)

    with counter([(9,), (9,)]) as env:
        driver = DynamicStepDriver(env, random_policy(env), [full_once], num_steps=20)
        with pytest.raises(OSError, match="no space left"):
            driver.run()
        assert len(rows) == 2
        driver.run()
    check_lanes(rows[:2], [(9,), (9,)])
    assert rows[2].is_first().all()
    check_lanes(rows[2:], [(9,), (9,)], skips_episodes=True)


def test_a_closed_environment_is_not_driven() -> None:
    with counter([(3,)]) as env:
        driver = DynamicStepDriver(env, random_policy(env))
    with pytest.raises(ClosedError):
        driver.run()


@pytest.mark.parametrize("num_steps", [0, -3, 2.5, None])
def test_a_count_below_one_is_refused(num_steps: Any) -> None:
    with (
        counter([(3,)]) as env,
        pytest.raises(OptionError, match=f"num_steps must be an integer of at least 1, got {num_steps}"),
    ):
        DynamicStepDriver(env, random_policy(env), [], num_steps)


def test_observers_that_can_not_be_called_are_refused() -> None:
    with counter([(3,)]) as env:
        policy = random_policy(env)
        with pytest.raises(OptionError, match=r"observers\[1\] must be callable with a Trajectory, got 3"):
            DynamicStepDriver(env, policy, [print, 3])  # type: ignore[list-item]
        with pytest.raises(OptionError, match=r"observers must be a list of callables, .*: \[observer\]"):
            DynamicStepDriver(env, policy, print)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="observers must be a list of callables, got None"):
            DynamicStepDriver(env, policy, None)  # type: ignore[arg-type]


def test_a_gymnasium_environment_and_a_policy_that_can_not_act_are_refused() -> None:
    with counter([(3,)]) as env:
        with pytest.raises(OptionError, match=r"env must be an environment of diskbuf, .*suite_gym\.wrap\(\)"):
            DynamicStepDriver(env.vector_env, random_policy(env))  # type: ignore[arg-type]
        with pytest.raises(
            OptionError, match=r"policy must have a method action\(time_step, policy_state\), got 'best'"
        ):
            DynamicStepDriver(env, "best")  # type: ignore[arg-type]


def test_a_time_step_of_another_kind_or_size_is_refused_before_any_step() -> None:
    with counter([(3,)]) as env, counter([(3,), (3,)]) as wider:
        driver = DynamicStepDriver(env, random_policy(env))
        with pytest.raises(SpecError, match="time_step must be a TimeStep or None, got tuple"):
            driver.run((0, 0, 1, np.zeros(4)))  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"leaf 'step_type' of time_step must have .* \[1\], got \[2\]"):
            driver.run(wider.reset())


def test_a_misspelt_keyword_is_a_type_error() -> None:
    with counter([(3,)]) as env, pytest.raises(TypeError, match="num_step"):
        DynamicStepDriver(env, random_policy(env), num_step=3)  # type: ignore[call-arg]
