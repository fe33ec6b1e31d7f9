"""Measures the layouts beside raw files, TensorStore and plain requests: what `make bench-layouts` runs."""

import beside
from beside import Measurement

MEASUREMENTS = {
    "shards": Measurement("decoding", "measure_shards"),
    "arrow": Measurement("decoding", "measure_arrow"),
    "compressed_pass": Measurement("stored_layouts", "measure_compressed_pass"),
    "warm_batches": Measurement("stored_layouts", "measure_warm_batches"),
    "arrow_pass": Measurement("stored_layouts", "measure_arrow_pass"),
    "sealing": Measurement("stored_layouts", "measure_sealing"),
    "streaming": Measurement("streaming", "measure_streaming"),
}

if __name__ == "__main__":
    beside.main(MEASUREMENTS, what="the layouts", name="layouts")
