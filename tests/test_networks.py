"""Q-networks: what they take, what they give, and what is said when they don't fit."""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from diskbuf.errors import OptionError, SpecError
from diskbuf.networks import QNetwork
from diskbuf.networks.action_values import DiscreteActions, check_q_network
from diskbuf.specs import ArraySpec, BoundedArraySpec

VECTOR = ArraySpec((4,), np.float32)
FOUR = BoundedArraySpec((), np.int64, 0, 3)


class Seen(NamedTuple):
    speed: Any
    camera: Any


def test_there_is_a_value_for_each_action() -> None:
    values = QNetwork(VECTOR, FOUR)(np.zeros((7, 4), np.float32))
    assert values.shape == (7, 4)
    assert values.dtype == "float32"
    assert QNetwork(VECTOR, BoundedArraySpec((), np.uint8, 3, 5))(np.zeros((1, 4), np.float32)).shape == (1, 3)


def test_layers_are_as_asked_for() -> None:
    network = QNetwork(VECTOR, FOUR, fc_layer_params=(5, 6), activation_fn="tanh")
    dense = [layer for layer in network.layers if isinstance(layer, keras.layers.Dense)]
    assert [layer.units for layer in dense] == [5, 6, 4]
    assert [layer.activation.__name__ for layer in dense] == ["tanh", "tanh", "linear"]
    assert [layer.units for layer in QNetwork(VECTOR, FOUR, fc_layer_params=()).layers if hasattr(layer, "units")] == [
        4
    ]


def test_values_begin_near_minus_a_fifth() -> None:
    values = QNetwork(VECTOR, FOUR, seed=0)(np.zeros((1, 4), np.float32))
    np.testing.assert_allclose(values, -0.2)
    last = QNetwork(VECTOR, FOUR, seed=0).layers[-1].kernel.numpy()
    assert 0.02 < np.abs(last).max() <= 0.03


def test_convolutions_take_images() -> None:
    network = QNetwork(ArraySpec((20, 20, 3), np.uint8), FOUR, conv_layer_params=[(8, 4, 2), (6, 3, 1)])
    assert network(np.full((2, 20, 20, 3), 255, np.uint8)).shape == (2, 4)
    convolutions = [layer for layer in network.layers if isinstance(layer, keras.layers.Conv2D)]
    assert [(layer.filters, layer.kernel_size, layer.strides) for layer in convolutions] == [
        (8, (4, 4), (2, 2)),
        (6, (3, 3), (1, 1)),
    ]


NESTS = {
    "dict": {"speed": ArraySpec((), np.float64), "camera": ArraySpec((3, 2), np.uint8)},
    "tuple": (ArraySpec((), np.int64), (ArraySpec((2,), np.bool_), ArraySpec((1, 1, 1), np.float32))),
    "namedtuple": Seen(speed=ArraySpec((), np.float32), camera=ArraySpec((3, 2), np.uint8)),
    "nested": {"a": {"b": ArraySpec((2,), np.float32)}, "c": ArraySpec((2,), np.float32)},
}


@pytest.mark.parametrize("name", NESTS)
def test_nests_of_any_dtype_are_taken_and_every_leaf_matters(name: str) -> None:
    from diskbuf.tree import Structure

    structure = Structure(NESTS[name])
    specs = structure.flatten(NESTS[name])
    network = QNetwork(NESTS[name], FOUR, seed=0, fc_layer_params=(64,))
    zeros = [np.zeros((5, *spec.shape), spec.dtype) for spec in specs]
    before = network(structure.unflatten(zeros)).numpy()
    assert before.shape == (5, 4)
    for at, leaf in enumerate(zeros):
        changed = network(structure.unflatten([*zeros[:at], np.ones_like(leaf), *zeros[at + 1 :]])).numpy()
        assert not np.array_equal(before, changed)


def test_preprocessing_layers_see_their_own_leaf_and_the_combiner_all() -> None:
    spec = {"left": ArraySpec((4, 4, 1), np.uint8), "right": ArraySpec((4, 4, 1), np.uint8)}
    network = QNetwork(
        spec,
        FOUR,
        conv_layer_params=[(16, 2, 1)],
        preprocessing_layers={"left": keras.layers.Rescaling(1 / 255), "right": keras.layers.Rescaling(0.0)},
        preprocessing_combiner=keras.layers.Concatenate(),
        seed=0,
    )
    black, white = np.zeros((1, 4, 4, 1), np.uint8), np.full((1, 4, 4, 1), 255, np.uint8)
    both, left, right = (
        network({"left": a, "right": b}).numpy() for a, b in [(black, black), (white, black), (black, white)]
    )
    assert not np.array_equal(both, left)
    np.testing.assert_array_equal(both, right)


def test_one_hot_encodes_categories() -> None:
    encode = keras.layers.CategoryEncoding(num_tokens=16, output_mode="one_hot")
    network = QNetwork(BoundedArraySpec((), np.int64, 0, 15), FOUR, preprocessing_layers=encode, fc_layer_params=())
    assert network(np.array([0, 15])).shape == (2, 4)
    assert network.layers[-1].kernel.shape == (16, 4)


def test_without_a_seed_weights_follow_keras() -> None:
    def weights() -> list[np.ndarray]:
        found: list[np.ndarray] = QNetwork(VECTOR, FOUR, fc_layer_params=(75, 75)).get_weights()
        return found

    keras.utils.set_random_seed(1)
    first = weights()
    keras.utils.set_random_seed(1)
    for mine, other in zip(first, weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert (first[0] != weights()[0]).any()


def test_equal_seeds_make_equal_networks_and_no_two_layers_are_equal() -> None:
    spec = ArraySpec((75,), np.float32)
    first, same, other = (QNetwork(spec, FOUR, fc_layer_params=(75, 75), seed=seed).get_weights() for seed in (1, 1, 2))
    for one, two in zip(first, same, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[2])


# Keras, when it writes weights, makes arrays of its variables in a way that NumPy 2 deprecates.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("name", NESTS)
def test_a_network_is_copied_and_saved_as_keras_does_it(name: str, tmp_path: Any) -> None:
    from diskbuf.tree import Structure

    structure = Structure(NESTS[name])
    ones = structure.unflatten([np.ones((2, *spec.shape), spec.dtype) for spec in structure.flatten(NESTS[name])])
    network = QNetwork(NESTS[name], FOUR)
    copy = keras.models.clone_model(network)
    copy.set_weights([weight + 1 for weight in network.get_weights()])
    assert not np.array_equal(network(ones), copy(ones))
    copy.set_weights(network.get_weights())
    np.testing.assert_array_equal(network(ones), copy(ones))
    network.save_weights(tmp_path / "q.weights.h5")
    again = QNetwork(NESTS[name], FOUR)
    again.load_weights(tmp_path / "q.weights.h5")
    np.testing.assert_array_equal(network(ones), again(ones))


@pytest.mark.parametrize(
    "spec",
    [
        ArraySpec((), np.int64),
        BoundedArraySpec((2,), np.int64, 0, 1),
        BoundedArraySpec((1,), np.int64, 0, 1),
        BoundedArraySpec((), np.float32, 0, 1),
        {"turn": FOUR},
        (FOUR, FOUR),
    ],
)
def test_actions_that_cannot_be_counted_are_refused(spec: Any) -> None:
    with pytest.raises(
        SpecError, match=r"action_spec must be one scalar BoundedArraySpec of integers, got .*discretize"
    ):
        QNetwork(VECTOR, spec)


def test_specs_of_gymnasium_are_taken() -> None:
    from gymnasium import spaces

    network = QNetwork(spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(3, start=2))
    assert network(np.zeros((1, 4), np.float32)).shape == (1, 3)
    assert DiscreteActions.of(spaces.Discrete(3, start=2)) == DiscreteActions(num_actions=3, minimum=2, dtype="int64")


def test_wrong_layers_are_refused() -> None:
    with pytest.raises(OptionError, match=r"fc_layer_params must be made of integers of at least 1, got 0"):
        QNetwork(VECTOR, FOUR, fc_layer_params=(75, 0))
    with pytest.raises(OptionError, match=r"conv_layer_params must be made of integers of at least 1, got 2.5"):
        QNetwork(VECTOR, FOUR, conv_layer_params=[(8, 2.5, 1)])  # type: ignore[list-item]
    with pytest.raises(OptionError, match=r"unless the observation is one image .*, got \[4\]. Put the convolutions"):
        QNetwork(VECTOR, FOUR, conv_layer_params=[(8, 2, 1)])
    with pytest.raises(OptionError, match=r"preprocessing_combiner must be given when 2 leaves go into convolutions"):
        QNetwork((VECTOR, VECTOR), FOUR, conv_layer_params=[(8, 2, 1)])
    with pytest.raises(SpecError, match=r"preprocessing_layers must be a nest like observation_spec: .*'b'.*Identity"):
        QNetwork({"a": VECTOR, "b": VECTOR}, FOUR, preprocessing_layers={"a": keras.layers.Identity()})
    with pytest.raises(OptionError, match="seed must be None or an integer"):
        QNetwork(VECTOR, FOUR, seed=-1)


def check(network: Any, observation_spec: Any = VECTOR) -> None:
    check_q_network(network, observation_spec, actions=DiscreteActions.of(FOUR), label="q_network")


def test_any_keras_model_of_the_right_output_passes_and_is_built() -> None:
    network = keras.Sequential([keras.layers.Dense(4)])
    check(network)
    assert network.built
    check(QNetwork(VECTOR, FOUR))


def test_a_network_of_another_output_is_refused() -> None:
    with pytest.raises(
        SpecError,
        match=r"q_network must give a float for each of the 4 actions, \[B, 4\], got float32 \[2, 3\] for B = 2",
    ):
        check(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(SpecError, match=r"got float32 \[2, 4, 1\] .*keras.layers.Dense\(4\)"):
        check(keras.Sequential([keras.layers.Dense(4), keras.layers.Reshape((4, 1))]))
    with pytest.raises(SpecError, match=r"got int32 \[2, 4\]"):
        check(lambda observation, training: keras.ops.cast(observation, "int32"))
    with pytest.raises(SpecError, match=r"got \(float32 \[2, 4\],\) for B"):
        check(lambda observation, training: (observation,))


def test_a_network_for_other_observations_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"q_network must take batches of observations float32 \[4\], got ValueError from"
    ):
        check(QNetwork(ArraySpec((5,), np.float32), FOUR))


def test_networks_are_tried_with_observations_inside_their_bounds() -> None:
    spec = BoundedArraySpec((4,), np.float32, 1, 2)
    seen = []
    check(lambda observation, training: seen.append(observation.numpy()) or observation, spec)  # type: ignore[func-returns-value]
    assert (seen[0] == 1).all()
