"""Measures collecting and training beside TF-Agents: what `make bench-learning` runs."""

import beside
from beside import Measurement

MEASUREMENTS = {
    "collect": Measurement("collecting", "measure_collect"),
    "train": Measurement("train_steps", "measure_train"),
}

if __name__ == "__main__":
    beside.main(MEASUREMENTS, what="diskbuf's drivers and train steps", name="learning")
