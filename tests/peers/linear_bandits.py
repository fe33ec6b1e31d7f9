"""TF-Agents' LinearUCBAgent and ours, trained on the same rows."""

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from tf_agents.bandits.agents import lin_ucb_agent
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import time_step as ts
from tf_agents.trajectories import trajectory

from diskbuf.bandits.agents import LinearUCBAgent
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import Trajectory, restart, time_step_spec

K, D, B, T = 4, 3, 8, 25
SETTINGS = [{}, {"alpha": 0.3, "tikhonov_weight": 5.0, "add_bias": True}, {"gamma": 0.8, "alpha": 2.0}]


def compare(arguments) -> int:
    random = np.random.default_rng(0)
    theirs = lin_ucb_agent.LinearUCBAgent(
        ts.time_step_spec(tf.TensorSpec([D], tf.float32)),
        tensor_spec.BoundedTensorSpec([], tf.int32, 0, K - 1),
        dtype=tf.float64,
        emit_policy_info=("predicted_rewards_mean", "predicted_rewards_optimistic"),
        **arguments,
    )
    ours = LinearUCBAgent(
        time_step_spec(ArraySpec((D,), np.float32)), BoundedArraySpec((), np.int32, 0, K - 1), **arguments
    )
    for call in range(3):
        context = random.normal(size=(B, T, D)).astype("float32")
        # In the second call one arm has no rows.
        action = random.integers(0, K - (call == 1), (B, T)).astype("int32")
        reward = random.normal(size=(B, T)).astype("float32")
        zeros, ones = np.zeros((B, T), "int32"), np.ones((B, T), "float32")
        info = theirs.policy.info_spec._replace(
            predicted_rewards_mean=tf.zeros([B, T, K], tf.float64),
            predicted_rewards_optimistic=tf.zeros([B, T, K], tf.float64),
        )
        their_loss = theirs.train(
            trajectory.Trajectory(
                *map(tf.constant, (zeros, context, action)),
                policy_info=info,
                next_step_type=tf.constant(zeros),
                reward=tf.constant(reward),
                discount=tf.constant(ones),
            )
        ).loss
        our_loss = ours.train(Trajectory(zeros, context, action, {"propensity": ones}, zeros, reward, ones)).loss
        np.testing.assert_allclose(our_loss, their_loss.numpy(), rtol=1e-4)
    np.testing.assert_allclose(ours.theta, theirs.theta.numpy(), atol=1e-5)
    np.testing.assert_allclose(ours.cov_matrix, [matrix.numpy() for matrix in theirs.cov_matrix], atol=1e-4)
    np.testing.assert_allclose(ours.data_vector, [vector.numpy() for vector in theirs.data_vector], atol=1e-4)
    assert ours.num_samples.tolist() == [int(number.numpy()) for number in theirs.num_samples]
    seen = random.normal(size=(200, D)).astype("float32")
    their_step = theirs.policy.action(ts.restart(tf.constant(seen), batch_size=200))
    our_step = ours.policy.action(restart(seen, batch_size=200))
    np.testing.assert_allclose(
        ours.policy.predicted_rewards(seen), their_step.info.predicted_rewards_mean.numpy(), atol=1e-5
    )
    expected, width = ours.policy.model.estimates(ours.policy.features(seen))
    np.testing.assert_allclose(
        expected + ours.alpha * width, their_step.info.predicted_rewards_optimistic.numpy(), atol=1e-5
    )
    np.testing.assert_array_equal(our_step.action, their_step.action.numpy())
    return len(seen)


if __name__ == "__main__":
    sys.stdout.write(f"{len(SETTINGS)} agents, {sum(map(compare, SETTINGS))} choices\n")
