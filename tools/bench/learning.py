"""Measures collecting, training and the bandit trainer beside TF-Agents: what `make bench-learning` runs."""

import beside
from beside import Measurement

MEASUREMENTS = {
    "collect": Measurement("collecting", "measure_collect"),
    "train": Measurement("train_steps", "measure_train"),
    "bandits": Measurement("bandit_training", "measure_bandits"),
}

if __name__ == "__main__":
    beside.main(MEASUREMENTS, what="diskbuf's drivers, train steps and bandit trainer", name="learning")
