"""Counting steps, going on, and what is left after an exception."""

import itertools
from typing import Any

import numpy as np
import pytest
import tqdm
from counter_environment import check_lanes, makers, numbers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf.drivers import Driver, DynamicEpisodeDriver, DynamicStepDriver
from diskbuf.environments import GymEnvironment, suite_gym
from diskbuf.errors import ClosedError, OptionError, SpecError
from diskbuf.policies import Policy, RandomPolicy
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory, from_transition

drivers = pytest.mark.parametrize("driver_class", [DynamicStepDriver, DynamicEpisodeDriver])
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
@pytest.mark.parametrize(("driver_class", "count"), [(DynamicStepDriver, 12), (DynamicEpisodeDriver, 2)])
def test_an_exception_in_the_environment_leaves_whole_rows_and_the_next_run_begins_an_episode(
    driver_class: Any, count: int, mode: AutoresetMode
) -> None:
    rows: list[Trajectory] = []
    lengths = [(5,), (4,)]
    with counter(lengths, mode, fails_at=(1, 2)) as env:
        driver = driver_class(env, random_policy(env), [rows.append], count)
        state = driver.run()
        with pytest.raises(RuntimeError, match="fails in episode 1 at 2"):
            driver.run(*state)
        before = len(rows)
        check_lanes(rows, lengths)
        for _ in range(5):
            state = driver.run(*state)  # the time step from before the exception
    assert rows[before].is_first().all()
    check_lanes(rows[before:], lengths, skips_episodes=True)


@pytest.mark.parametrize(
    ("driver_class", "count"), [(DynamicStepDriver, "num_steps"), (DynamicEpisodeDriver, "num_episodes")]
)
@pytest.mark.parametrize("watches", ["observers", "transition_observers"])
def test_an_exception_in_an_observer_leaves_no_two_rows_that_do_not_belong_together(
    driver_class: Any, count: str, watches: str
) -> None:
    rows: list[Trajectory] = []
    calls = 0

    def full_once(seen: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no space left")
        rows.append(seen if isinstance(seen, Trajectory) else from_transition(*seen))

    with counter([(9,), (9,)]) as env:
        driver = driver_class(env, random_policy(env), **{count: 20, watches: [full_once]})
        first = env.current_time_step()
        with pytest.raises(OSError, match="no space left"):
            driver.run(first)
        assert len(rows) == 2
        driver.run(first)
    check_lanes(rows[:2], [(9,), (9,)])
    assert rows[2].is_first().all()
    check_lanes(rows[2:], [(9,), (9,)], skips_episodes=True)


@drivers
def test_a_closed_environment_is_not_driven(driver_class: Any) -> None:
    with counter([(3,)]) as env:
        driver = driver_class(env, random_policy(env))
    with pytest.raises(ClosedError):
        driver.run()


@pytest.mark.parametrize("num_steps", [0, -3, 2.5, None])
def test_a_count_below_one_is_refused(num_steps: Any) -> None:
    with (
        counter([(3,)]) as env,
        pytest.raises(OptionError, match=f"num_steps must be an integer of at least 1, got {num_steps}"),
    ):
        DynamicStepDriver(env, random_policy(env), [], num_steps)


@pytest.mark.parametrize("number", [0, -3, 2.5])
def test_a_count_of_episodes_below_one_is_refused_before_any_step(number: Any) -> None:
    with counter([(3,)]) as env:
        with pytest.raises(OptionError, match=f"num_episodes must be an integer of at least 1, got {number}"):
            DynamicEpisodeDriver(env, random_policy(env), [], number)
        driver = DynamicEpisodeDriver(env, random_policy(env))
        first = env.current_time_step()
        with pytest.raises(OptionError, match=f"num_episodes must be an integer of at least 1, got {number}"):
            driver.run(num_episodes=number)
        with pytest.raises(OptionError, match=f"maximum_iterations must be an integer of at least 1, got {number}"):
            driver.run(maximum_iterations=number)
        assert env.current_time_step() is first


def test_transition_observers_that_can_not_be_called_are_refused() -> None:
    with counter([(3,)]) as env:
        policy = random_policy(env)
        with pytest.raises(OptionError, match=r"transition_observers\[0\] must be callable with a tuple .*, got 3"):
            DynamicEpisodeDriver(env, policy, transition_observers=[3])  # type: ignore[list-item]
        with pytest.raises(OptionError, match="transition_observers must be a list of callables, got"):
            DynamicStepDriver(env, policy, transition_observers=print)  # type: ignore[arg-type]


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
    with counter([(3,)]) as env:
        with pytest.raises(TypeError, match="num_step"):
            DynamicStepDriver(env, random_policy(env), num_step=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="num_episode"):
            DynamicEpisodeDriver(env, random_policy(env), num_episode=3)  # type: ignore[call-arg]


def test_there_is_no_driver_without_a_stopping_rule() -> None:
    with counter([(3,)]) as env, pytest.raises(TypeError, match="abstract"):
        Driver(env, random_policy(env), [], transition_observers=[], progress=False)  # type: ignore[abstract]


def boundaries_in(rows: list[Trajectory]) -> int:
    return sum(int(np.count_nonzero(row.is_boundary())) for row in rows)


@modes
def test_an_episode_is_complete_with_its_boundary_row(mode: AutoresetMode) -> None:
    rows: list[Trajectory] = []
    with counter([(3,)], mode) as env:
        driver = DynamicEpisodeDriver(env, random_policy(env), [rows.append], num_episodes=2)
        time_step, _ = driver.run()
    assert len(rows) == 2 * (3 + 1)
    assert numbers(rows[3].observation)[0, 2] == 3  # the final observation
    assert time_step.is_first().all()


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    num_episodes=st.integers(1, 8),
    mode=st.sampled_from(AutoresetMode),
)
def test_a_run_ends_with_the_row_that_completes_the_last_episode(
    lengths: list[int], num_episodes: int, mode: AutoresetMode
) -> None:
    rows: list[Trajectory] = []
    own_lengths = [(length,) for length in lengths]
    with counter(own_lengths, mode) as env:
        DynamicEpisodeDriver(env, random_policy(env), [rows.append], num_episodes).run()
    check_lanes(rows, own_lengths)
    assert boundaries_in(rows[:-1]) < num_episodes <= boundaries_in(rows) < num_episodes + len(lengths)


@modes
def test_runs_of_episodes_that_go_on_from_a_time_step_are_one_long_one(mode: AutoresetMode) -> None:
    rows: list[Trajectory] = []
    with counter([(3,), (5,)], mode) as env:
        driver = DynamicEpisodeDriver(env, random_policy(env), [rows.append])
        time_step, policy_state = driver.run()
        for _ in range(9):
            time_step, policy_state = driver.run(time_step, policy_state)
            assert time_step is env.current_time_step()
    check_lanes(rows, [(3,), (5,)])
    assert boundaries_in(rows) >= 10


def test_a_step_driver_and_an_episode_driver_go_on_from_each_other() -> None:
    rows: list[Trajectory] = []
    with counter([(3,), (5,)]) as env:
        policy = random_policy(env)
        steps = DynamicStepDriver(env, policy, [rows.append], num_steps=7)
        episodes = DynamicEpisodeDriver(env, policy, [rows.append])
        state: tuple[Any, ...] = ()
        for _ in range(5):
            state = episodes.run(*steps.run(*state))
    check_lanes(rows, [(3,), (5,)])


def test_a_lane_that_is_at_its_end_completes_that_episode() -> None:
    rows: list[Trajectory] = []
    with counter([(3,)]) as env:
        policy = random_policy(env)
        time_step, _ = DynamicStepDriver(env, policy, num_steps=3).run()
        assert time_step.is_last().all()
        DynamicEpisodeDriver(env, policy, [rows.append]).run(time_step)
    assert [row.is_boundary().tolist() for row in rows] == [[True]]


def test_episodes_without_a_time_step_begin_anew_where_steps_go_on() -> None:
    with counter([(9,)]) as env:
        policy = random_policy(env)
        for driver_class, first_t in ((DynamicStepDriver, 2), (DynamicEpisodeDriver, 0)):
            env.reset()
            env.step(np.array([0]))
            env.step(np.array([0]))
            rows: list[Trajectory] = []
            driver_class(env, policy, [rows.append]).run()
            assert numbers(rows[0].observation)[0, 2] == first_t


def test_a_run_may_ask_for_another_number_of_episodes() -> None:
    rows: list[Trajectory] = []
    with counter([(3,)]) as env:
        driver = DynamicEpisodeDriver(env, random_policy(env), [rows.append], num_episodes=1)
        driver.run(num_episodes=4)
        assert boundaries_in(rows) == 4
        driver.run()
        assert boundaries_in(rows) == 5


@drivers
def test_a_run_ends_after_the_most_rows_it_may_take(driver_class: Any) -> None:
    rows: list[Trajectory] = []
    with counter([(99,)]) as env:
        driver = driver_class(env, random_policy(env), [rows.append], 50)
        state = driver.run(maximum_iterations=3)
        assert len(rows) == 3
        driver.run(*state, maximum_iterations=4)
    assert len(rows) == 7
    check_lanes(rows, [(99,)])


@drivers
def test_transition_observers_see_what_each_row_was_made_of(driver_class: Any) -> None:
    rows: list[Trajectory] = []
    transitions: list[Any] = []
    with counter([(3,), (2,)]) as env:
        driver = driver_class(env, random_policy(env), [rows.append], 4, transition_observers=[transitions.append])
        driver.run()
        assert driver.transition_observers == (transitions.append,)
    assert len(rows) == len(transitions) > 1
    for row, (time_step, policy_step, next_time_step) in zip(rows, transitions, strict=True):
        assert isinstance(policy_step, PolicyStep)
        for field, other in zip(row, from_transition(time_step, policy_step, next_time_step), strict=True):
            np.testing.assert_array_equal(field, other)
    assert all(one[2] is other[0] for one, other in itertools.pairwise(transitions))


@pytest.mark.parametrize(("driver_class", "unit"), [(DynamicStepDriver, "steps"), (DynamicEpisodeDriver, "episodes")])
def test_a_progress_bar_counts_to_the_end_when_asked_for(
    driver_class: Any, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counter([(3,)] * 4) as env:
        driver_class(env, random_policy(env), [], 6, progress=True).run()  # 8 are taken
        shown = capsys.readouterr().err
        assert "6/6" in shown
        assert f"{unit}/s" in shown
        driver_class(env, random_policy(env), [], 6).run()
        assert capsys.readouterr().err == ""


def test_a_progress_bar_is_closed_when_an_observer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Kept(tqdm.tqdm):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            bars.append(self)

    def fails(row: Trajectory) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("tqdm.auto.tqdm", Kept)
    with counter([(3,)]) as env:
        driver = DynamicStepDriver(env, random_policy(env), [fails], 6, progress=True)
        with pytest.raises(OSError, match="no space left"):
            driver.run()
    assert [bar.disable for bar in bars] == [True]  # what tqdm says of a closed one


@modes
@drivers
def test_a_step_that_no_policy_could_take_leaves_the_driver_usable(driver_class: Any, mode: AutoresetMode) -> None:
    class SometimesOutside(RandomPolicy):
        calls = 0

        def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
            self.calls += 1
            action = super().action(time_step).action
            return PolicyStep(action + 100 if self.calls == 5 else action)

    rows: list[Trajectory] = []
    with counter([(3,), (5,)], mode) as env:
        policy = SometimesOutside(env.time_step_spec(), env.action_spec(), seed=0)
        driver = driver_class(env, policy, [rows.append], 20)
        with pytest.raises(SpecError, match="leaf 'action' must lie within"):
            driver.run()
        assert len(rows) == 4
        driver.run()
    check_lanes(rows[:4], [(3,), (5,)])
    check_lanes(rows[4:], [(3,), (5,)], skips_episodes=True)


def test_a_failed_reset_leaves_no_row_that_claims_to_go_on() -> None:
    rows: list[Trajectory] = []
    with counter([(9,)]) as env:
        driver = DynamicEpisodeDriver(env, random_policy(env), [rows.append])
        state = driver.run(maximum_iterations=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(env.vector_env.envs[0], "reset", lambda **_: 1 / 0)  # type: ignore[attr-defined]
            with pytest.raises(ZeroDivisionError):
                driver.run()
        driver.run(*state, maximum_iterations=2)  # the time step from before
    assert [row.is_first().tolist() for row in rows] == [[True], [False], [True], [False]]


@modes
@pytest.mark.parametrize(("driver_class", "count"), [(DynamicStepDriver, 30), (DynamicEpisodeDriver, 9)])
def test_a_buffer_that_fails_once_holds_whole_rows_of_whole_lanes(
    driver_class: Any, count: int, mode: AutoresetMode, tmp_path: Any
) -> None:
    with counter([(3,), (5,)], mode, fails_at=(2, 1)) as env:
        env.vector_env.envs[1].fails_at = None  # type: ignore[attr-defined]
        policy = random_policy(env)
        with diskbuf.UniformReplayBuffer(policy.trajectory_spec, 2, 1000, path=tmp_path / "steps.zarr") as buffer:
            driver = driver_class(env, policy, [buffer.add_batch], count)
            with pytest.raises(RuntimeError, match="fails in episode 2 at 1"):
                driver.run()
            before = buffer.next_id
            driver.run()
    with diskbuf.open(tmp_path / "steps.zarr") as buffer:
        stored = buffer.gather_all()
    rows = [
        Trajectory(*(() if isinstance(field, tuple) else field[:, t] for field in stored))
        for t in range(stored.reward.shape[1])
    ]
    check_lanes(rows[:before], [(3,), (5,)])
    check_lanes(rows[before:], [(3,), (5,)], skips_episodes=True)
    assert len(rows) > before
    assert diskbuf.verify(tmp_path / "steps.zarr").is_clean
