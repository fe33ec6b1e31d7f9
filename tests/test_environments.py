"""Gymnasium environments as time steps: the order of steps in every autoreset mode, dtypes, copies, seeds."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from counter_environment import CounterEnvironment, End, check_lanes, makers, numbers, reward_of
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.environments import GymEnvironment, suite_gym
from diskbuf.errors import ClosedError, OptionError, SpecError
from diskbuf.policies import RandomPolicy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory, from_transition
from diskbuf.tree import Structure

MODES = tuple(AutoresetMode)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
Lengths = Sequence[Sequence[int]]


def sync(lengths: Lengths, mode: AutoresetMode, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv(makers(lengths, **kwargs), autoreset_mode=mode)


def wrapped(lengths: Lengths, mode: AutoresetMode, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    """Behind a wrapper the environments can't be stepped one by one, only reset so."""
    return VectorWrapper(sync(lengths, mode, **kwargs))


def in_processes(lengths: Lengths, mode: AutoresetMode, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    # Python warns when a process with threads forks, and other tests leave threads in pools.
    return AsyncVectorEnv(makers(lengths, **kwargs), autoreset_mode=mode, context="spawn")


def rows_of(env: GymEnvironment, vector_steps: int, seed: int = 0) -> list[Trajectory]:
    """Rows of random actions, each a deep copy, so that a later change would be seen."""
    rng = np.random.default_rng(seed)
    rows, time_step = [], env.reset()
    for _ in range(vector_steps):
        action = rng.integers(0, 10, env.batch_size)
        next_time_step = env.step(action)
        rows.append(copy.deepcopy(from_transition(time_step, PolicyStep(action), next_time_step)))
        time_step = next_time_step
    return rows


@modes
@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("is_dict", [False, True], ids=["array", "dict"])
@pytest.mark.parametrize("make", [sync, wrapped])
def test_no_row_takes_a_reset_for_a_step(
    make: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode, end: End, is_dict: bool
) -> None:
    lengths = [(3,), (5,)]
    with suite_gym.wrap(make(lengths, mode, ends=(end,), is_dict=is_dict)) as env:
        rows = rows_of(env, 20)
    skips_episodes = make is wrapped and mode is not AutoresetMode.NEXT_STEP
    assert check_lanes(rows, lengths, (end,), skips_episodes=skips_episodes) == [
        15,
        17,
    ]  # of 4 and of 6 rows an episode


@modes
def test_no_row_takes_a_reset_for_a_step_in_processes(mode: AutoresetMode) -> None:
    lengths = [(3,), (5,)]
    with suite_gym.wrap(in_processes(lengths, mode)) as env:
        rows = rows_of(env, 20)
    assert check_lanes(rows, lengths, skips_episodes=mode is not AutoresetMode.NEXT_STEP) == [15, 17]


@modes
def test_a_plain_sync_environment_takes_no_step_that_is_not_in_a_row(mode: AutoresetMode) -> None:
    lengths = [(1,), (2, 4), (7,)]
    vector_env = SyncVectorEnv(makers(lengths), autoreset_mode=mode)
    with suite_gym.wrap(vector_env) as env:
        rows = rows_of(env, 50)
    counts = check_lanes(rows, lengths)
    assert [lane.num_steps for lane in vector_env.envs] == counts  # type: ignore[attr-defined]
    rewards = sum(row.reward.astype(np.float64) for row in rows)
    for lane, inner in enumerate(vector_env.envs):
        played = [
            reward_of(lane, *numbers(row.observation)[lane, 1:3].astype(int), int(row.action[lane]))
            for row in rows
            if not row.is_boundary()[lane]
        ]
        assert len(played) == inner.num_steps  # type: ignore[attr-defined]
        assert rewards[lane] == sum(played)


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    ends=st.lists(st.sampled_from(["terminated", "truncated"]), min_size=1, max_size=3),
    reuses_array=st.booleans(),
)
def test_a_sync_environment_gives_the_same_rows_in_all_modes(
    lengths: list[list[int]], ends: list[End], reuses_array: bool
) -> None:
    def rows(make: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode) -> list[Trajectory]:
        with suite_gym.wrap(make(lengths, mode, ends=ends, reuses_array=reuses_array)) as env:
            return rows_of(env, 12)

    expected = rows(wrapped, AutoresetMode.NEXT_STEP)  # where Gymnasium does the work
    check_lanes(expected, lengths, ends)
    for mode in MODES:
        for row, other in zip(expected, rows(sync, mode), strict=True):
            for field, other_field in zip(row, other, strict=True):
                np.testing.assert_array_equal(field, other_field)


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    is_dict=st.booleans(),
)
def test_lanes_reset_by_mask_go_in_the_same_order(lengths: list[int], mode: AutoresetMode, is_dict: bool) -> None:
    own_lengths = [(length,) for length in lengths]
    with suite_gym.wrap(wrapped(own_lengths, mode, is_dict=is_dict)) as env:
        rows = rows_of(env, 12)
    counts = check_lanes(rows, own_lengths, skips_episodes=True)
    assert counts == [12 - 12 // (length + 1) for length in lengths]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_a_lane_reset_by_mask_wastes_one_step_and_one_reset_an_episode(mode: AutoresetMode) -> None:
    vector_env = sync([(2,), (99,)], mode)
    with suite_gym.wrap(VectorWrapper(vector_env)) as env:
        rows = rows_of(env, 9)
    assert [row.observation[0, 1] for row in rows if row.is_first()[0]] == [0, 2, 4]
    inner = vector_env.envs[0]  # type: ignore[attr-defined]
    assert inner.num_steps == 3 * 2 + 3  # three episodes, each with its boundary


@modes
@pytest.mark.parametrize("make", [sync, wrapped])
def test_lanes_that_all_end_together_waste_nothing(
    make: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode
) -> None:
    lengths = [(3,), (3,)]
    with suite_gym.wrap(make(lengths, mode)) as env:
        assert check_lanes(rows_of(env, 12), lengths) == [9, 9]


def test_a_time_limit_truncates_and_shows_the_true_last_observation() -> None:
    plain = gymnasium.make("CartPole-v1")
    expected = [plain.reset(seed=5)[0], *(plain.step(1)[0] for _ in range(3))]
    for autoreset_mode in ("next_step", "same_step", "disabled"):
        with suite_gym.load("CartPole-v1", seed=5, max_episode_steps=3, autoreset_mode=autoreset_mode) as env:
            time_steps = [env.reset(), *(env.step(np.array([1])) for _ in range(4))]
        assert [int(time_step.step_type[0]) for time_step in time_steps] == [0, 1, 1, 2, 0]
        assert [float(time_step.discount[0]) for time_step in time_steps] == [1, 1, 1, 1, 1]
        np.testing.assert_array_equal([time_step.observation[0] for time_step in time_steps[:4]], expected)
        assert not np.array_equal(time_steps[4].observation[0], expected[3])
    plain.close()


@modes
@pytest.mark.parametrize("is_dict", [False, True], ids=["array", "dict"])
def test_an_environment_that_reuses_its_array_changes_no_time_step(mode: AutoresetMode, is_dict: bool) -> None:
    with suite_gym.wrap(sync([(3,), (5,)], mode, reuses_array=True, is_dict=is_dict)) as env:
        observations = [env.reset().observation, *(env.step(np.array([1, 2])).observation for _ in range(9))]
    seen = np.stack([numbers(observation) for observation in observations])
    assert len(np.unique(seen[:, 0], axis=0)) == len(np.unique(seen[:, 1], axis=0)) == 10


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("is_dict", [False, True], ids=["array", "dict"])
def test_a_vector_environment_that_reuses_its_arrays_changes_no_time_step(copies: bool, is_dict: bool) -> None:
    vector_env = SyncVectorEnv(makers([(3,), (5,)], is_dict=is_dict), copy=copies)
    for given_env in (vector_env, VectorWrapper(vector_env)):
        env = suite_gym.wrap(given_env)
        time_step = env.reset()
        before = copy.deepcopy(time_step)
        env.step(np.zeros(2, np.int64))
        np.testing.assert_equal(time_step._asdict(), before._asdict())
    vector_env.close()


@pytest.mark.parametrize("is_dict", [False, True], ids=["array", "dict"])
def test_the_final_observation_of_same_step_gets_the_specs_dtype(is_dict: bool) -> None:
    vector_env = wrapped([(2,), (9,)], AutoresetMode.SAME_STEP, raw_dtype=np.float64, is_dict=is_dict)
    with suite_gym.wrap(vector_env) as env:
        env.reset()
        time_steps = [env.step(np.array([7, 8])) for _ in range(3)]
    assert [int(time_step.step_type[0]) for time_step in time_steps] == [1, 2, 0]
    assert [numbers(time_step.observation)[0, 2] for time_step in time_steps] == [1, 2, 0]
    assert all(numbers(time_step.observation).dtype == np.float32 for time_step in time_steps)


def test_an_info_dict_whose_keys_change_is_ignored() -> None:
    with suite_gym.wrap(makers([(3,), (4,)])) as env:
        assert check_lanes(rows_of(env, 10), [(3,), (4,)]) == [8, 8]


def test_the_specs_are_those_of_one_lane() -> None:
    with suite_gym.load("CartPole-v1", num_envs=3) as env:
        assert env.batch_size == env.reset().reward.shape[0] == 3
        assert env.batched
        assert env.action_spec() == BoundedArraySpec((), np.int64, 0, 1)
        assert env.observation_spec().shape == (4,)
        assert env.time_step_spec() == TimeStep(
            ArraySpec((), np.int32),
            ArraySpec((), np.float32),
            BoundedArraySpec((), np.float32, 0, 1),
            env.observation_spec(),
        )


@modes
def test_time_steps_have_the_specs_dtypes_and_a_batch_axis_even_for_one(mode: AutoresetMode) -> None:
    with suite_gym.wrap(sync([(2,)], mode)) as env:
        for time_step in (env.reset(), *(env.step(np.array([1])) for _ in range(4))):
            assert (time_step.step_type.dtype, time_step.step_type.shape) == (np.int32, (1,))
            assert (time_step.reward.dtype, time_step.reward.shape) == (np.float32, (1,))
            assert (time_step.discount.dtype, time_step.discount.shape) == (np.float32, (1,))
            assert (time_step.observation.dtype, time_step.observation.shape) == (np.float32, (1, 4))


def test_a_discrete_action_with_a_start_is_played_as_it_is() -> None:
    class Shifted(CounterEnvironment):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Discrete(3, start=5)

    with suite_gym.wrap([Shifted]) as env:
        env.reset()
        assert env.step(np.array([7])).reward == 7
        with pytest.raises(SpecError, match=r"leaf 'action' must lie within \[5, 7\], got 0 in lane 0"):
            env.step(np.array([0]))


def test_the_first_step_of_all_is_a_reset() -> None:
    with suite_gym.wrap(makers([(3,)])) as env:
        assert env.step(np.array([1])).is_first().all()
    with suite_gym.wrap(makers([(3,)])) as env:
        first = env.current_time_step()
        assert first.is_first().all()
        assert env.current_time_step() is first
        assert env.step(np.array([1])) is env.current_time_step()


@modes
def test_a_reset_inside_an_episode_begins_new_ones_in_all_lanes(mode: AutoresetMode) -> None:
    with suite_gym.wrap(sync([(2,), (5,)], mode)) as env:
        for steps in (1, 2, 3):  # the first lane is inside an episode, at its end, at the next one's beginning
            env.reset()
            for _ in range(steps):
                env.step(np.array([0, 0]))
            assert env.reset().is_first().all()
            assert env.step(np.array([0, 0])).is_mid().all()


def episodes(env: GymEnvironment) -> list[Any]:
    with env:
        return [env.reset().observation, *(env.step(np.array([1, 1])).observation for _ in range(30))]


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step", "disabled"])
def test_equal_seeds_give_equal_episodes_in_every_mode(autoreset_mode: str) -> None:
    expected = episodes(suite_gym.load("CartPole-v1", 2, seed=3))
    np.testing.assert_array_equal(
        episodes(suite_gym.load("CartPole-v1", 2, seed=3, autoreset_mode=autoreset_mode)), expected
    )
    assert not np.array_equal(episodes(suite_gym.load("CartPole-v1", 2, seed=4)), expected)
    assert not np.array_equal(expected[0][0], expected[0][1])


def test_only_the_first_reset_is_seeded() -> None:
    with suite_gym.load("CartPole-v1", seed=3) as env:
        assert not np.array_equal(env.reset().observation, env.reset().observation)


def test_load_takes_the_environments_arguments_wrappers_and_own_vectorization() -> None:
    def negated(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TransformReward(env, lambda reward: -10 * float(reward))

    with suite_gym.load("CartPole-v1", gym_kwargs={"sutton_barto_reward": True}) as env:
        env.reset()
        assert env.step(np.array([0])).reward == 0
    with suite_gym.load("CartPole-v1", gym_env_wrappers=[negated]) as env:
        env.reset()
        assert env.step(np.array([0])).reward == -10
    with suite_gym.load("CartPole-v1", 4, vectorization="vector_entry_point", max_episode_steps=2) as env:
        env.reset()
        kinds = [env.step(np.zeros(4, np.int64)).step_type.tolist() for _ in range(3)]
        assert kinds == [[1] * 4, [2] * 4, [0] * 4]


# Python 3.12 warns when a process with threads forks, which is Gymnasium's choice here; 3.14 no longer forks.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_load_puts_lanes_into_processes() -> None:
    expected = episodes(suite_gym.load("CartPole-v1", 2, seed=3))
    np.testing.assert_array_equal(episodes(suite_gym.load("CartPole-v1", 2, seed=3, vectorization="async")), expected)


@modes
@pytest.mark.parametrize("make", [sync, wrapped])
def test_after_an_exception_in_the_environment_all_lanes_begin_again(
    make: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode
) -> None:
    with suite_gym.wrap(make([(5,), (5,)], mode, fails_at=(0, 2))) as env:
        env.reset()
        env.step(np.array([1, 1]))
        env.step(np.array([1, 1]))
        with pytest.raises(RuntimeError, match="environment 0 fails in episode 0 at 2"):
            env.step(np.array([1, 1]))
        assert env.current_time_step().is_first().all()
        assert numbers(env.current_time_step().observation)[:, 1].tolist() == [1, 1]


def test_nothing_works_after_close_save_closing_again() -> None:
    with suite_gym.load("CartPole-v1") as env:
        env.reset()
    env.close()
    for use in (env.reset, env.current_time_step, lambda: env.step(np.array([0]))):
        with pytest.raises(ClosedError, match=r"GymEnvironment\(.*\) must be open, but it was closed"):
            use()


BAD_ACTIONS = [
    (np.array([0, 2]), r"leaf 'action' must lie within \[0, 1\], got 2 in lane 1\. Clip it"),
    (np.array([-1, 0]), r"leaf 'action' must lie within \[0, 1\], got -1 in lane 0"),
    (np.array([0, 1], np.int32), r"leaf 'action' must be int64 \[2\], got int32 \[2\]\. Cast it"),
    (np.array([0.0, 1.0]), r"leaf 'action' must be int64 \[2\], got float64 \[2\]"),
    (np.array([0, 1, 1]), r"leaf 'action' must be int64 \[2\], got int64 \[3\]\. Leaves are \[batch_size"),
    (np.int64(0), r"leaf 'action' must be int64 \[2\], got int64 \[\]\. Add the batch axis"),
    ({"move": np.array([0, 1])}, r"the action doesn't fit the action_spec: items must be"),
    (None, r"the action doesn't fit the action_spec: items must be"),
]


@pytest.mark.parametrize(("action", "message"), BAD_ACTIONS)
def test_an_action_outside_its_spec_is_refused_before_any_step(action: Any, message: str) -> None:
    with suite_gym.load("CartPole-v1", 2, seed=0) as env:
        time_step = env.reset()
        with pytest.raises(SpecError, match=message):
            env.step(action)
        assert env.current_time_step() is time_step
        after = env.step(np.array([0, 1])).observation
    with suite_gym.load("CartPole-v1", 2, seed=0) as env:
        env.reset()
        np.testing.assert_array_equal(env.step(np.array([0, 1])).observation, after)


class Echo(gymnasium.Env[Any, Any]):
    """Shows the last action."""

    def __init__(self, action_space: spaces.Space[Any], *, length: int = 1000) -> None:
        self.action_space = action_space
        self.observation_space = action_space
        self.length = length
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.action_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return action, 0.0, self.t == self.length, False, {}


def test_nested_actions_reach_the_environment_as_they_are() -> None:
    space = spaces.Dict(
        {
            "turn": spaces.Discrete(3, start=-1),
            "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 5]))),
            "arm": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 9], np.float32)),
        }
    )
    action = {
        "turn": np.array([-1, 1]),
        "pair": (np.array([[0, 1], [1, 1]], np.int8), np.array([[1, 4], [0, 0]])),
        "arm": np.array([[-1, 9], [0.5, 0]], np.float32),
    }
    for mode in MODES:
        with suite_gym.wrap(SyncVectorEnv([lambda: Echo(space)] * 2, autoreset_mode=mode)) as env:
            env.reset()
            seen = env.step(action).observation
            np.testing.assert_equal(seen, action)
            bad = {**action, "arm": np.array([[-1, 9], [0.5, -0.5]], np.float32)}
            with pytest.raises(
                SpecError, match=r"leaf 'action/arm' must lie within \[0\.0, 9\.0\], got -0\.5 in lane 1"
            ):
                env.step(bad)
            with pytest.raises(SpecError, match=r"leaf 'action/pair/1' must be int64 \[2, 2\], got float64"):
                env.step({**action, "pair": (action["pair"][0], np.zeros((2, 2)))})


@pytest.mark.parametrize("high", [1.0, np.inf])
def test_a_nan_action_is_outside_any_bounds(high: float) -> None:
    with suite_gym.wrap([lambda: Echo(spaces.Box(-high, high, (2,), np.float32))]) as env:
        env.reset()
        with pytest.raises(SpecError, match=r"leaf 'action' must lie within .* got nan in lane 0"):
            env.step(np.array([[0.0, np.nan]], np.float32))


class Scripted(VectorEnv[Any, Any, Any]):
    """A vector environment of two lanes that returns what it is told to."""

    def __init__(self, mode: Any = AutoresetMode.NEXT_STEP, **returned: Any) -> None:
        self.num_envs = 2
        self.metadata = {"autoreset_mode": mode}
        self.single_action_space = self.action_space = spaces.Discrete(2)
        self.single_observation_space = spaces.Dict({"camera": spaces.Box(0, 255, (3,), np.uint8)})
        self.returned = {
            "observation": {"camera": np.zeros((2, 3), np.uint8)},
            "reward": [0.5, 1],
            "terminated": [False, False],
            "truncated": [False, False],
            "infos": {},
            **returned,
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"camera": np.zeros((2, 3), np.uint8)}, {}

    def step(self, actions: Any) -> Any:
        return tuple(self.returned.values())


BAD_RETURNS = [
    ({"observation": {"camera": np.zeros((2, 3))}}, r"leaf 'observation/camera' must be uint8 \[2, 3\], got float64"),
    ({"observation": {"camera": np.zeros((3, 3), np.uint8)}}, r"leaf 'observation/camera' .* got uint8 \[3, 3\]"),
    ({"observation": np.zeros((2, 3), np.uint8)}, "the observation doesn't fit its spec: items must be"),
    ({"reward": [None, None]}, r"rewards and flags must be numbers \[2\], got object \[2\]"),
    ({"reward": 1.0}, r"rewards and flags must be numbers \[2\], got float64 \[\]"),
    ({"terminated": [True], "truncated": [False]}, r"rewards and flags must be numbers \[2\], got .* and \[1\]"),
]


@pytest.mark.parametrize(("returned", "message"), BAD_RETURNS)
def test_what_an_environment_returns_must_fit_its_spaces(returned: dict[str, Any], message: str) -> None:
    env = suite_gym.wrap(Scripted(**returned))
    env.reset()
    with pytest.raises(SpecError, match=message):
        env.step(np.array([0, 1]))


def test_lists_for_rewards_and_flags_will_do() -> None:
    env = suite_gym.wrap(Scripted(terminated=[True, False], truncated=[True, True]))
    env.reset()
    time_step = env.step(np.array([0, 1]))
    assert time_step.step_type.tolist() == [2, 2]
    assert time_step.discount.tolist() == [0, 1]
    assert time_step.reward.tolist() == [0.5, 1]


def test_same_step_without_a_final_observation_is_refused() -> None:
    env = suite_gym.wrap(Scripted(AutoresetMode.SAME_STEP, terminated=[True, False]))
    env.reset()
    with pytest.raises(
        SpecError, match=r"infos must hold 'final_obs' when an episode ends in SAME_STEP mode, got \[\]"
    ):
        env.step(np.array([0, 1]))


def test_a_final_observation_of_another_shape_or_kind_is_refused() -> None:
    for camera, got in ((np.zeros(2, np.uint8), r"uint8 \[2\]"), (np.zeros(3), r"float64 \[3\]")):
        infos = {"final_obs": [{"camera": camera}, None]}
        env = suite_gym.wrap(Scripted(AutoresetMode.SAME_STEP, terminated=[True, False], infos=infos))
        env.reset()
        with pytest.raises(SpecError, match=rf"final_obs leaf 'camera' must be uint8 \[3\], got {got}"):
            env.step(np.array([0, 1]))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_a_vector_environment_that_knows_no_reset_mask_is_refused(mode: AutoresetMode) -> None:
    class ResetsAll(VectorWrapper[Any, Any, Any, Any, Any]):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return self.env.reset(seed=seed)

    with suite_gym.wrap(ResetsAll(sync([(3,), (5,)], mode))) as env:
        env.reset()
        for _ in range(3):
            env.step(np.array([0, 0]))
        with pytest.raises(OptionError, match=r"must reset only the lanes in options\['reset_mask'\].*NEXT_STEP"):
            env.step(np.array([0, 0]))


@pytest.mark.parametrize("mode", [None, "next_step"])
def test_a_vector_environment_that_hides_its_autoreset_mode_is_refused(mode: Any) -> None:
    with pytest.raises(OptionError, match=r"metadata\['autoreset_mode'\] of .* must be .* got (None|'next_step')"):
        suite_gym.wrap(Scripted(mode))


@pytest.mark.parametrize("name", ["CartPool-v1", "CartPole-v99", "nowhere/CartPole-v1", "not a name"])
def test_an_unknown_environment_is_refused_by_name(name: str) -> None:
    with pytest.raises(OptionError, match=rf"environment_name must be one that Gymnasium knows, got '{name}'"):
        suite_gym.load(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs must be an integer of at least 1, got 0"),
        ({"num_envs": 2.5}, r"num_envs must be an integer of at least 1, got 2\.5"),
        ({"max_episode_steps": 0}, "max_episode_steps must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be None or an integer of at least 0, got -1"),
        ({"seed": "one"}, "seed must be None or an integer of at least 0, got 'one'"),
        ({"vectorization": "threads"}, "vectorization must be one of 'sync', 'async', .* got 'threads'"),
        ({"autoreset_mode": "never"}, "autoreset_mode must be one of 'next_step', .* got 'never'"),
        (
            {"vectorization": "vector_entry_point", "autoreset_mode": "disabled"},
            "autoreset_mode and gym_env_wrappers must be left alone",
        ),
    ],
)
def test_an_option_outside_its_rule_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        suite_gym.load("CartPole-v1", **options)


def test_what_is_no_vector_environment_is_refused_with_the_way_to_make_one() -> None:
    single = CounterEnvironment()
    with pytest.raises(OptionError, match=r"vector_env must be .* pass a function that makes it: wrap\(\[make\]\)"):
        GymEnvironment(single)  # type: ignore[arg-type]
    for env in (CounterEnvironment, [single], [], 3):
        with pytest.raises(OptionError, match=r"env must be a gymnasium\.Env, .* wrap\(\[make\] \* num_envs\)"):
            suite_gym.wrap(env)  # type: ignore[arg-type]


def test_a_single_environment_of_ones_own_is_wrapped_as_one_lane() -> None:
    with suite_gym.wrap(CounterEnvironment()) as env:
        assert env.batch_size == 1
        assert env.reset().observation.shape[0] == 1


def test_a_time_limit_of_ones_own_environments_truncates_them() -> None:
    for own in (CounterEnvironment(lengths=(9,)), [lambda: CounterEnvironment(lengths=(9,))]):
        with suite_gym.wrap(own, max_episode_steps=2) as env:
            rows = rows_of(env, 6)
        assert [int(row.step_type[0]) for row in rows] == [0, 1, 2] * 2
        assert [int(row.next_step_type[0]) for row in rows] == [1, 2, 0] * 2
        assert [float(row.discount[0]) for row in rows] == [1] * 6
        assert [row.observation[0, 2] for row in rows] == [0, 1, 2] * 2


def test_an_episode_that_ends_at_its_time_limit_has_terminated() -> None:
    with suite_gym.wrap([lambda: CounterEnvironment(lengths=(2,))], max_episode_steps=2) as env:
        assert rows_of(env, 2)[1].discount == 0


def test_a_time_limit_for_a_vector_environment_is_refused() -> None:
    with pytest.raises(OptionError, match=r"max_episode_steps must be None with a .*VectorEnv, got 3\. Give its"):
        suite_gym.wrap(Scripted(), max_episode_steps=3)
    with pytest.raises(OptionError, match="max_episode_steps must be an integer of at least 1, got 0"):
        suite_gym.wrap(CounterEnvironment(), max_episode_steps=0)


EVERY_SPACE = spaces.Dict(
    {
        "turn": spaces.Discrete(3, start=-1),
        "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 5], start=[3, 0]))),
        "arm": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 9], np.float32)),
        "camera": spaces.Box(0, 255, (2, 2, 1), np.uint8),
        "clock": spaces.Box(0.0, 1.0, (), np.float64),
    }
)


def echoes(lanes: int, mode: AutoresetMode, kind: str) -> VectorEnv[Any, Any, Any]:
    make = [lambda: Echo(EVERY_SPACE, length=3)] * lanes
    if kind == "async":
        return AsyncVectorEnv(make, autoreset_mode=mode, context="spawn")
    vector_env = SyncVectorEnv(make, autoreset_mode=mode)
    return vector_env if kind == "sync" else VectorWrapper(vector_env)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*((kind, mode) for kind in ("sync", "wrapped") for mode in MODES), ("async", AutoresetMode.SAME_STEP)],
)
def test_every_kind_of_space_comes_and_goes_as_it_is(kind: str, mode: AutoresetMode) -> None:
    with suite_gym.wrap(echoes(2, mode, kind)) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        specs_of = Structure(env.observation_spec())
        time_step = env.reset()
        for _ in range(9):
            action = policy.action(time_step).action
            next_time_step = env.step(action)
            if not time_step.is_last().any():  # both lanes are in step
                np.testing.assert_equal(next_time_step.observation, action)
            time_step = next_time_step
            leaves = specs_of.flatten(time_step.observation)
            for leaf, spec in zip(leaves, specs_of.flatten(env.observation_spec()), strict=True):
                assert (leaf.dtype, leaf.shape) == (spec.dtype, (2, *spec.shape))


def test_a_discrete_observation_with_a_start_keeps_its_values() -> None:
    with suite_gym.wrap([lambda: Echo(spaces.Discrete(3, start=5))] * 2) as env:
        env.reset()
        assert env.observation_spec() == BoundedArraySpec((), np.int64, 5, 7)
        assert env.step(np.array([5, 7])).observation.tolist() == [5, 7]


class Odd(CounterEnvironment):
    """Returns something odd from its second step on, where told to also from a reset."""

    def __init__(self, **odd: Any) -> None:
        super().__init__(is_dict=odd.pop("is_dict", False), lengths=(4,))
        self.odd = odd

    def reset(self, **arguments: Any) -> Any:
        outcome = super().reset(**arguments)
        return self.odd.get("reset", outcome)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.t < 2:
            return observation, reward, *rest
        if "step" in self.odd:
            return self.odd["step"]
        return self.odd.get("observation", observation), self.odd.get("reward", reward), *rest


WHERE = {"where": np.zeros(3, np.float32)}
ODD_RETURNS = [
    (
        {"observation": np.zeros(3, np.float32)},
        r"leaf 'observation' must be float32 \[4\], got float32 \[3\] in lane 1",
    ),
    ({"observation": np.zeros(4, np.complex64)}, r"leaf 'observation' must be float32 \[4\], got complex64 \[4\]"),
    ({"observation": [1.0, [2.0]]}, r"the observation of lane 1 doesn't fit its spec: items must be an array"),
    (
        {"is_dict": True, "observation": {**WHERE, "action": np.zeros(2, np.float32)}},
        r"leaf 'observation/action' must be float32 \[\], got float32 \[2\] in lane 1\. Mend what <Odd",
    ),
    (
        {"is_dict": True, "observation": WHERE},
        "the observation of lane 1 doesn't fit its spec: .* Add the key 'action'",
    ),
    ({"is_dict": True, "observation": None}, "the observation of lane 1 doesn't fit its spec: items must be"),
    ({"reward": None}, "leaf 'reward' must be one number, got None in lane 1"),
    ({"reward": "3"}, "leaf 'reward' must be one number, got str in lane 1"),
    ({"reward": np.zeros(1)}, r"leaf 'reward' must be one number, got float64 \[1\] in lane 1"),
    ({"step": (np.zeros(4), 0.0, False, {})}, r"step\(\) must return \(observation, .* in lane 1\. .* older Gym"),
    ({"step": None}, r"step\(\) must return \(observation, reward, terminated, truncated, info\), got None"),
]


@pytest.mark.parametrize(("odd", "message"), ODD_RETURNS)
def test_an_environment_that_breaks_its_promises_is_named_by_lane_and_leaf(odd: dict[str, Any], message: str) -> None:
    good = {"is_dict": odd.get("is_dict", False)}
    with suite_gym.wrap([lambda: Odd(**good), lambda: Odd(**odd)]) as env:
        env.reset()
        env.step(np.array([0, 0]))
        with pytest.raises(SpecError, match=message):
            env.step(np.array([0, 0]))
        assert env.current_time_step().is_first().all()
        assert env.step(np.array([0, 0])).is_mid().all()


def test_a_reset_of_the_older_kind_is_refused() -> None:
    with (
        suite_gym.wrap([lambda: Odd(reset=np.zeros(2))]) as env,
        pytest.raises(SpecError, match=r"reset\(\) must return \(observation, info\), got float64 \[2\] in lane 0"),
    ):
        env.reset()


def test_whole_and_numpy_rewards_will_do() -> None:
    for reward in (3, np.float32(3), np.int64(3), np.array(3.0)):
        with suite_gym.wrap([lambda reward=reward: Odd(reward=reward)]) as env:  # type: ignore[misc]
            env.reset()
            env.step(np.array([0]))
            assert env.step(np.array([0])).reward == 3


NOT_FINITE = [
    (
        {"observation": np.array([0, 0, np.nan, 0], np.float32)},
        r"leaf 'observation' must be finite, got nan in lane 1 at \[2\]",
    ),
    (
        {"is_dict": True, "observation": {**WHERE, "action": np.float32(-np.inf)}},
        r"leaf 'observation/action' must be finite, got -inf in lane 1\. Mend .* use check_finite=False",
    ),
    ({"reward": np.nan}, "leaf 'reward' must be finite in float32, got nan in lane 1"),
    ({"reward": 1e300}, r"leaf 'reward' must be finite in float32, got 1e\+300 in lane 1"),
]


@pytest.mark.parametrize(("odd", "message"), NOT_FINITE)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_numbers_that_are_not_finite_are_refused_when_asked(
    odd: dict[str, Any], message: str, mode: AutoresetMode, is_wrapped: bool
) -> None:
    good = {"is_dict": odd.get("is_dict", False)}
    vector_env: Any = SyncVectorEnv([lambda: Odd(**good), lambda: Odd(**odd)], autoreset_mode=mode)
    with suite_gym.wrap(VectorWrapper(vector_env) if is_wrapped else vector_env, check_finite=True) as env:
        env.reset()
        env.step(np.array([0, 0]))
        with pytest.raises(SpecError, match=message):
            env.step(np.array([0, 0]))
        assert env.current_time_step().is_first().all()


def test_a_first_observation_that_is_not_finite_is_refused_when_asked() -> None:
    first = np.full(4, np.inf, np.float32), {}
    for own in (Odd(reset=first), [lambda: Odd(reset=first)]):
        with (
            suite_gym.wrap(own, check_finite=True) as env,
            pytest.raises(SpecError, match=r"leaf 'observation' must be finite, got inf in lane 0 at \[0\]"),
        ):
            env.reset()


def test_numbers_that_are_not_finite_pass_when_not_asked() -> None:
    odd = {"observation": np.full(4, np.nan, np.float32), "reward": np.nan}
    with suite_gym.wrap([lambda: Odd(**odd)]) as env:
        env.reset()
        env.step(np.array([0]))
        time_step = env.step(np.array([0]))
    assert np.isnan(time_step.reward).all()
    assert np.isnan(time_step.observation).all()


def test_the_reward_between_two_episodes_is_nobodys_and_may_be_anything() -> None:
    env = suite_gym.wrap(Scripted(terminated=[True, False]), check_finite=True)
    env.reset()
    env.step(np.array([0, 1]))
    env.vector_env.returned["reward"] = [np.nan, 1]  # type: ignore[attr-defined]
    assert env.step(np.array([0, 1])).reward.tolist() == [0, 1]


def test_load_checks_for_finite_numbers_too() -> None:
    def poisoned(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TransformReward(env, lambda reward: float("nan"))

    with suite_gym.load("CartPole-v1", gym_env_wrappers=[poisoned], check_finite=True) as env:
        env.reset()
        with pytest.raises(SpecError, match="leaf 'reward' must be finite in float32, got nan in lane 0"):
            env.step(np.array([0]))


@modes
@pytest.mark.parametrize("make", [sync, wrapped])
def test_an_environment_that_was_closed_underneath_is_not_stepped(
    make: Callable[..., VectorEnv[Any, Any, Any]], mode: AutoresetMode
) -> None:
    env = suite_gym.wrap(make([(3,)], mode))
    env.reset()
    env.vector_env.close()
    for use in (env.reset, env.current_time_step, lambda: env.step(np.array([0]))):
        with pytest.raises(ClosedError, match=r"must be open, but it was closed\. Make it again"):
            use()
    env.close()


def test_a_misspelt_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="num_env"):
        suite_gym.load("CartPole-v1", num_env=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sede"):
        suite_gym.wrap(makers([(3,)]), sede=1)  # type: ignore[call-arg]
