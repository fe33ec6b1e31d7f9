"""TF-Agents' buffers and ours, given the same rows and asked the same things. Prints how many answers were compared."""

import builtins
import itertools
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from tf_agents.replay_buffers import py_uniform_replay_buffer, tf_uniform_replay_buffer
from tf_agents.specs import array_spec, tensor_spec
from tf_agents.trajectories import policy_step, time_step, trajectory

from diskbuf.replay_buffers import PyUniformReplayBuffer, TFUniformReplayBuffer

LANES, LENGTH = 3, 5
PUBLIC_ERRORS = {
    thing for module in (builtins, tf.errors) for thing in vars(module).values() if isinstance(thing, type)
}
compared = 0

TIME_STEP_SPEC = time_step.time_step_spec(
    {
        "image": tensor_spec.BoundedTensorSpec([2, 2], tf.uint8, 0, 255, "image"),
        "at": (tf.TensorSpec([], tf.int64, "id"), tf.TensorSpec([1], tf.float64, "lane")),
    }
)
SPEC = trajectory.from_transition(
    TIME_STEP_SPEC,
    policy_step.PolicyStep(
        tensor_spec.BoundedTensorSpec([], tf.int32, 0, 3, "action"), (), {"log": tf.TensorSpec([], tf.float32, "log")}
    ),
    TIME_STEP_SPEC,
)


SMALL_SPEC = SPEC.observation["at"]


def step(step_id, data_spec=SPEC):
    """One step of every lane; each leaf tells the id and the lane."""
    code = step_id * 10 + np.arange(LANES)
    return tf.nest.map_structure(
        lambda spec: tf.constant(
            np.broadcast_to(code.reshape([LANES] + [1] * len(spec.shape)), [LANES, *spec.shape]).astype(
                spec.dtype.as_numpy_dtype
            )
        ),
        data_spec,
    )


def pair(added, data_spec=SPEC, **arguments):
    buffers = tuple(
        kind(data_spec, LANES, LENGTH, **arguments)
        for kind in (tf_uniform_replay_buffer.TFUniformReplayBuffer, TFUniformReplayBuffer)
    )
    for step_id in range(added):
        for buffer in buffers:
            buffer.add_batch(step(step_id, data_spec))
    return buffers


def same(theirs, ours):
    """Structure, classes of namedtuples, dtypes, shapes and values are equal."""
    global compared
    compared += 1
    tf.nest.assert_same_structure(theirs, ours)
    for their_leaf, our_leaf in zip(tf.nest.flatten(theirs), tf.nest.flatten(ours), strict=True):
        assert isinstance(our_leaf, tf.Tensor)
        assert (their_leaf.dtype, their_leaf.shape) == (our_leaf.dtype, our_leaf.shape)
        np.testing.assert_array_equal(their_leaf, our_leaf)


def same_specs(theirs, ours):
    global compared
    compared += 1
    tf.nest.assert_same_structure(theirs, ours)
    facts = [[(spec.dtype, spec.shape.as_list()) for spec in tf.nest.flatten(nest)] for nest in (theirs, ours)]
    assert facts[0] == facts[1], facts


def contents():
    for added in (0, 4, 5, 9):
        theirs, ours = pair(added)
        with ours:
            same(theirs.gather_all(), ours.gather_all())
            same(theirs.num_frames(), ours.num_frames())
            same(theirs.capacity, ours.capacity)
            same_specs(*(tf.function(b.gather_all).get_concrete_function().structured_outputs for b in (theirs, ours)))
            for buffer in (theirs, ours):
                assert buffer.clear() is None
            same(theirs.gather_all(), ours.gather_all())
            same(theirs.num_frames(), ours.num_frames())


def samples():
    theirs, ours = pair(4)
    with ours:
        for size, steps, stacked in itertools.product((None, 6), (None, 1, 2), (True, False)):
            arguments = size, steps, stacked
            asked = [tf.function(lambda b=b, a=arguments: b.get_next(*a)) for b in (theirs, ours)]
            same_specs(*(function.get_concrete_function().structured_outputs for function in asked))
            eager = [b.get_next(*arguments) for b in (theirs, ours)]
            same_specs(*eager)
            same(*(info.probabilities for _, info in eager))
            items, info = eager[1]
            first, ids = (items[0], info.ids[0]) if isinstance(info.ids, tuple) else (items, info.ids)
            assert type(first) is trajectory.Trajectory
            np.testing.assert_array_equal(first.observation["at"][0] // 10, ids)


def datasets():
    for size, steps in ((None, None), (None, 2), (LANES, None), (1, 2), (LANES, 2)):
        theirs, ours = pair(0, SMALL_SPEC)
        with ours:
            same_specs(*(b.as_dataset(size, steps).element_spec for b in (theirs, ours)))
        for added, drops, shift in ((5, False, None), (4, True, 1)):
            theirs, ours = pair(added, SMALL_SPEC, dataset_drop_remainder=drops, dataset_window_shift=shift)
            with ours:
                passes = [b.as_dataset(size, steps, single_deterministic_pass=True) for b in (theirs, ours)]
                same_specs(*(dataset.element_spec for dataset in passes))
                # Where the last window of some lanes is short, TF-Agents fills it up with the first steps of the next.
                # (After the ring has wrapped it mixes lanes too.)
                if size not in (None, LANES) and steps is not None and (shift is not None or added % steps):
                    continue
                for (their_items, _), (our_items, info) in zip(*passes, strict=True):
                    same(their_items, our_items)
                    np.testing.assert_array_equal(our_items[0] // 10, info.ids)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error
    raise AssertionError("nothing was raised")


def errors():
    """Whatever catches TF-Agents' errors catches ours."""
    global compared
    good = step(0)
    spare = tf.zeros([LANES + 1], tf.float32)
    cases = {
        "sample of an empty buffer": lambda b: b.get_next(2),
        "sample of an empty buffer in a graph": lambda b: tf.function(lambda: b.get_next(2))(),
        "element of an empty buffer": lambda b: next(iter(b.as_dataset(2))),
        "pass over an empty buffer": lambda b: next(iter(b.as_dataset(2, single_deterministic_pass=True))),
        "a missing leaf": lambda b: b.add_batch(good._replace(policy_info={})),
        "another leaf": lambda b: b.add_batch(good._replace(policy_info={"other": spare[1:]})),
        "another dtype": lambda b: b.add_batch(good._replace(reward=tf.zeros([LANES], tf.int32))),
        "other lanes": lambda b: b.add_batch(good._replace(reward=spare)),
        "other lanes in a graph": lambda b: tf.function(lambda r: [b.add_batch(good._replace(reward=r)), 0][1])(spare),
        "a pass that drops all": lambda b: b.as_dataset(LANES + 1, single_deterministic_pass=True),
        "a function for a pass": lambda b: b.as_dataset(sequence_preprocess_fn=len, single_deterministic_pass=True),
        "a misspelt argument": lambda b: b.as_dataset(size=3),
    }
    for name, function in cases.items():
        theirs, ours = pair(0, dataset_drop_remainder=True)
        with ours:
            expected, found = error_of(function, theirs), error_of(function, ours)
            # gin makes a class of its own for each error, of the same name, to add to its message.
            kind = next(k for k in type(expected).__mro__ if k in PUBLIC_ERRORS)
            if name == "a function for a pass":
                kind = NotImplementedError  # their override of as_dataset lost the argument: TypeError
            assert isinstance(found, kind), (name, expected, found)
            assert not isinstance(found, (AttributeError, AssertionError))
            assert ours.num_frames() == 0
            compared += 1


def array_buffer():
    spec = {"a": array_spec.ArraySpec([2], np.float32), "b": (array_spec.BoundedArraySpec([], np.int64, 0, 99),)}
    theirs, ours = py_uniform_replay_buffer.PyUniformReplayBuffer(spec, 4), PyUniformReplayBuffer(spec, 4)
    with ours:
        for number in range(4):
            for buffer in (theirs, ours):
                buffer.add_batch({"a": np.full([1, 2], number, "float32"), "b": (np.array([number]),)})
        assert theirs.size == ours.size
        assert theirs.capacity == ours.capacity
        # Full for the first time is the one moment at which theirs returns the rows in order, and nothing else.
        tf.nest.map_structure(np.testing.assert_array_equal, theirs.gather_all(), ours.gather_all())
        for size, steps in itertools.product((None, 3), (None, 2)):
            same_specs(*(b.as_dataset(size, steps).element_spec for b in (theirs, ours)))
            shapes = [
                tf.nest.map_structure(lambda x: (x.dtype, x.shape), b.get_next(size, steps)) for b in (theirs, ours)
            ]
            assert shapes[0] == shapes[1], shapes


if __name__ == "__main__":
    contents()
    samples()
    datasets()
    errors()
    array_buffer()
    sys.stdout.write(f"{compared} compared\n")
