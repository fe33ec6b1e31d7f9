"""Writes rows from a file with TF-Agents' TFRecordObserver, as its drivers do.

    records.py ROWS.npz FOLDER

Started by tests/test_exchange_tf_agents.py, which reads the record files. Writes nested.tfrecord, the same rows with
their images as JPEG (lossy.tfrecord), and specs of many kinds, each to a file of its own (NUMBER.spec).
"""

import os
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import policy_step, time_step, trajectory
from tf_agents.utils import example_encoding, example_encoding_dataset, nest_utils


class ByteOrderedDType:
    """A TensorFlow dtype whose NumPy scalars can be given a byte order, as NumPy 1 let TF-Agents' encoder do."""

    def __init__(self, dtype):
        self._dtype = dtype

    def __getattr__(self, name):
        return getattr(self._dtype, name)

    def __eq__(self, other):
        return self._dtype == other

    def __hash__(self):
        return hash(self._dtype)

    def as_numpy_dtype(self, _):
        return np.dtype(self._dtype.as_numpy_dtype)


validate_dtype = example_encoding._validate_dtype
example_encoding._validate_dtype = lambda dtype: ByteOrderedDType(validate_dtype(dtype))


def main() -> None:
    rows, folder = dict(np.load(sys.argv[1])), Path(sys.argv[2])
    observation = {
        "image": tensor_spec.BoundedTensorSpec([2, 3, 1], tf.uint8, 0, 255, name="image"),
        "numbers": tensor_spec.BoundedTensorSpec([4], tf.float32, [-1, -1, -1, -1], [1000, 1000, 1000, 9]),
    }
    info = {
        "arm": tf.TensorSpec([2], tf.int32),
        "log_probability": tf.TensorSpec([], tf.float32),
        "value": tf.TensorSpec([3], tf.float64),
    }
    action = policy_step.PolicyStep(tensor_spec.BoundedTensorSpec([], tf.int64, 0, 9, name="action"), (), info)
    steps = time_step.time_step_spec(observation)
    spec = trajectory.from_transition(steps, action, steps)
    for name, is_lossy in (("nested", False), ("lossy", True)):
        write(folder / f"{name}.tfrecord", spec, rows, compress_image=is_lossy)
    bare_steps = time_step.time_step_spec(observation["numbers"])
    bare = trajectory.from_transition(bare_steps, action._replace(info=()), bare_steps)
    write(folder / "bare.tfrecord", bare, rows)
    for number, one in enumerate(specs_of_many_kinds()):
        example_encoding_dataset.encode_spec_to_file(str(folder / f"{number}.spec"), one)


def write(path, spec, rows, **arguments):
    observer = example_encoding_dataset.TFRecordObserver(str(path), spec, **arguments)
    paths = [name for name, _ in nest_utils.flatten_with_joined_paths(spec)]
    if path.stem == "bare":
        paths[paths.index("observation")] = "observation/numbers"
    for t in range(len(rows["reward"])):
        leaves = [tf.constant(rows[name][t][None]) for name in paths]
        observer(tf.nest.pack_sequence_as(spec, leaves))
    observer.close()


def specs_of_many_kinds():
    yield tf.TensorSpec([], tf.float32)
    yield (tf.TensorSpec([3, 2], tf.uint8, name="frame"), [tf.TensorSpec([1], tf.int16)], {})
    bounded = tensor_spec.BoundedTensorSpec
    for dtype in (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16):
        yield bounded([2, 3], dtype, 0 if dtype.is_unsigned else -3, 7)
        yield bounded([3], dtype, [0, 1, 2], [3, 4, 6], name="three")
    yield bounded([], tf.float32, -np.inf, np.inf)
    yield time_step.time_step_spec(tf.TensorSpec([4], tf.float32))


if __name__ == "__main__":
    main()
