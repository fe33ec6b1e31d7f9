"""From logged decisions in CSV files to a store, to trained policies, to a table of what each would have earned.

    python examples/open_bandit_offline.py random/men/men.csv --folder runs/open_bandit

The columns are those of the Open Bandit Dataset (Saito, Aihara, Matsutani, Narita: "Open Bandit Dataset and Pipeline",
2021), which https://research.zozo.com/data.html has; for other logs name yours. The first half of the log trains, the
second half judges, so that no policy is judged by the rows it has learnt from. Killed and run again, it goes on.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # for networks this small the CPU is faster

import keras
import numpy as np

import diskbuf
from diskbuf.bandits import agents, evaluation, logs, trainer
from diskbuf.networks import QNetwork


def agents_for(specs: tuple[Any, Any], seed: int) -> dict[str, Any]:
    """What is trained, by name."""
    network = QNetwork(specs[0].observation, specs[1], fc_layer_params=(32,), seed=seed)
    return {
        "linear_ucb": agents.LinearUCBAgent(*specs, alpha=0.1, add_bias=True, seed=seed),
        "linear_thompson": agents.LinearThompsonSamplingAgent(*specs, alpha=0.1, add_bias=True, seed=seed),
        "epsilon_greedy": agents.NeuralEpsilonGreedyAgent(
            *specs, network, keras.optimizers.Adam(3e-3), epsilon=0.1, seed=seed
        ),
    }


def main() -> None:
    """Reads the command line, imports, trains, and prints the estimates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", help="logs with a header line, oldest first")
    parser.add_argument("--folder", type=Path, default=Path("runs/open_bandit"), help="default: %(default)s")
    parser.add_argument("--context", nargs="*", default=[f"user_feature_{n}" for n in range(4)], help="columns")
    parser.add_argument("--action", default="item_id", help="column of what was shown (default: %(default)s)")
    parser.add_argument("--reward", default="click", help="column of what came of it (default: %(default)s)")
    parser.add_argument("--propensity", default="propensity_score", help="its probability (default: %(default)s)")
    parser.add_argument("--timestamp", default="timestamp", help="when it was shown (default: %(default)s)")
    parser.add_argument("--num-epochs", type=int, default=10, help="passes over the first half (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default: 0)")
    options = parser.parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it tells of every policy that is saved

    store = options.folder / "log.zarr"
    if not store.exists():
        columns = logs.LogColumns(
            context=options.context,
            action=options.action,
            reward=options.reward,
            propensity=options.propensity,
            timestamp=options.timestamp,
        )
        print(logs.import_log(options.files, store, columns, order="sort"))
    with diskbuf.open(store) as log:
        specs = diskbuf.trajectories.time_step_spec(log.data_spec.observation), log.data_spec.action
        half = (log.first_id + log.next_id) // 2
    num_actions = int(specs[1].maximum) + 1
    policies: dict[str, Any] = {"uniform": np.full(num_actions, 1 / num_actions)}
    for name, agent in agents_for(specs, options.seed).items():
        trainer.train_offline(options.folder / name, agent, store, options.num_epochs, next_id=half)
        policies[name] = agent.policy
    for name, policy in policies.items():
        print(f"\n{name}\n{evaluation.evaluate(store, policy, first_id=half, seed=options.seed)}")


if __name__ == "__main__":
    main()
