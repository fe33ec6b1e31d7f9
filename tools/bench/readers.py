"""Measures diskbuf's readers beside TF-Agents: what `make bench-readers` runs."""

import beside
from beside import Measurement

MEASUREMENTS = {
    "graph": Measurement("beside_tf_agents", "measure_graph"),
    "eager": Measurement("beside_tf_agents", "measure_eager"),
    "frames": Measurement("beside_tf_agents", "measure_frames"),
    "pass": Measurement("beside_tf_agents", "measure_pass"),
    "numpy": Measurement("numpy_reads", "measure_numpy"),
    "cold": Measurement("cold_rows", "measure_cold"),
    "many": Measurement("many_datasets", "measure_many"),
}

if __name__ == "__main__":
    beside.main(MEASUREMENTS, what="diskbuf's readers", name="readers")
