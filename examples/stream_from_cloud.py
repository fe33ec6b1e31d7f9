"""Collects CartPole-v1 in one process, publishes it to object storage, and learns from the URL in another one.

    python examples/stream_from_cloud.py

Without `--url` an S3 server is started here, with nothing behind it but memory. With it the steps go to a bucket of
yours: `--url s3://bucket/cartpole.zarr`, the credentials where its client looks for them.

What is learned is what a state is worth under the random policy that collects: LSTD(0), Bradtke and Barto, "Linear
Least-Squares Algorithms for Temporal Difference Learning", 1996.
"""

import argparse
import contextlib
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.policies import RandomPolicy

LANES = 8
GAMMA = 0.95
BATCH_SIZE, BATCHES = 256, 100
PUBLISH_SECONDS = 0.2
SCALES = np.array([2.4, 3.0, 0.2, 3.0])  # of position, velocity, angle, angular velocity


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs an S3 server on this machine; yields the URL of a bucket and what opens it."""
    try:
        import fsspec
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise SystemExit(
            "the S3 server of this example is moto: pip install 'diskbuf[test]', or give a --url"
        ) from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
        fsspec.filesystem("s3", **options).mkdir("bucket")
        yield "s3://bucket/cartpole.zarr", options
    finally:
        server.stop()


def collect(store: Path, url: str, options: dict[str, Any], num_steps: int, seed: int) -> None:
    """Adds steps to a store here, which is published as it grows."""
    with (
        suite_gym.load("CartPole-v1", num_envs=LANES, seed=seed) as env,
        diskbuf.UniformReplayBuffer(
            RandomPolicy(env.time_step_spec(), env.action_spec()).trajectory_spec,
            batch_size=LANES,
            max_length=None,
            path=store,
            options=diskbuf.StoreOptions(codec="zstd"),
            publish_to=url,
            publish_seconds=PUBLISH_SECONDS,
            storage_options=options,
        ) as buffer,
    ):
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=seed)
        driver = DynamicStepDriver(env, policy, [buffer.add_batch], num_steps=num_steps)
        driver.run(env.reset(), ())


def features(observation: NDArray[np.float32]) -> NDArray[np.float64]:
    """[K, 4] observations as [K, 11]: 1, and all products of two of them."""
    scaled = observation / SCALES
    first, second = np.triu_indices(4)
    return np.concatenate([np.ones((len(scaled), 1)), scaled[:, first] * scaled[:, second]], axis=1)


class Values:
    """What states are worth, from pairs of steps that follow each other."""

    def __init__(self) -> None:
        self.a = 10 * np.eye(11)  # a little towards 0, for the first few thousand pairs
        self.b = np.zeros(11)

    def learn(self, steps: Any) -> None:
        """Takes [K, 2] steps in; those that lead from one episode to the next are left out."""
        counts = ~steps.is_boundary()[:, 0]
        now, following = (features(steps.observation[counts, t]) for t in (0, 1))
        discount = GAMMA * steps.discount[counts, 0, None]
        self.a += now.T @ (now - discount * following)
        self.b += now.T @ steps.reward[counts, 0]

    def of(self, *, angle: float) -> float:
        """What it is worth that the pole leans by an angle, all at rest."""
        return float((features(np.array([[0, 0, angle, 0]], np.float32)) @ np.linalg.solve(self.a, self.b))[0])


def learn(url: str, options: dict[str, Any], collector: Any) -> None:
    """Learns from what is published so far, whenever there is more, until the collector has ended."""
    values, pairs, seen, is_last = Values(), 0, 0, False
    with opened(url, options, collector) as buffer:
        batches = buffer.as_numpy_iterator(BATCH_SIZE, 2, seed=1)
        while not is_last:
            is_last = not collector.is_alive()  # asked first: what it published last is then seen below
            buffer.refresh()
            if buffer.num_frames() <= max(seen, LANES):
                time.sleep(0 if is_last else PUBLISH_SECONDS / 4)
                continue
            seen = buffer.num_frames()
            for _ in range(BATCHES):
                steps, _ = next(batches)
                values.learn(steps)
            pairs += BATCHES * BATCH_SIZE
            upright, leaning = values.of(angle=0.0), values.of(angle=0.2)
            print(f"{seen:7,} steps there: upright is worth {upright:.1f}, leaning {leaning:.1f}")
    print(f"learned from {pairs:,} pairs of {seen:,} steps at {url}")


def opened(url: str, options: dict[str, Any], collector: Any) -> diskbuf.UniformReplayBuffer:
    """Opens a store that is being published, as soon as it is there."""
    while True:
        is_alive = collector.is_alive()
        try:
            return diskbuf.open(url, follow=True, storage_options=options)
        except diskbuf.StoreNotFoundError:
            if not is_alive:
                raise
            time.sleep(0.1)


def main() -> None:
    """Reads the command line, and runs both processes."""
    parser = argparse.ArgumentParser(description="Publish CartPole-v1 to object storage and learn from the URL.")
    parser.add_argument("--url", help="where to publish; without it an S3 server is started here")
    parser.add_argument("--num-steps", type=int, default=200_000, help="steps to collect (200000)")
    parser.add_argument("--seed", type=int, default=1, help="of the collector (1)")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url, options = (arguments.url, {}) if arguments.url else stack.enter_context(s3_server())
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "cartpole.zarr"
        collector = multiprocessing.get_context("spawn").Process(
            target=collect, args=(store, url, options, arguments.num_steps, arguments.seed)
        )
        collector.start()
        try:
            learn(url, options, collector)
        finally:
            collector.join()
        if collector.exitcode:
            raise SystemExit("the collector has failed")


if __name__ == "__main__":
    main()
