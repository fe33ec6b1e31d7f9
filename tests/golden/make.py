"""Makes the golden stores, which every later version must open. Run once for each format of the store:

    python tests/golden/make.py tests/golden/format-1

It refuses a folder that is there: stores of a format that was released are never made again. What the steps hold is
said by `steps`, so a test can say what must come back.
"""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskbuf

LANES = 2
RING_LENGTH = 6
RUN_STARTS = (0, 12)
NEXT_ID = 17
METADATA = {"made by": "tests/golden/make.py", "numbers": [1, 2.5, None, True], "größe": "ß"}
BOOT_ID = slice(16, 32)
# What each format brought, by the names of its stores.
FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    "format-1": {"ring.zarr": {}, "history.zarr": {}},
    "format-2": {"ring.zarr": {"codec": "zstd"}, "history.zarr": {"codec": "blosc"}, "ring.arrow": {"layout": "arrow"}},
}


class Pair(NamedTuple):
    """A namedtuple that readers can't import."""

    exact: Any
    coarse: Any


SPEC = {
    "camera": diskbuf.BoundedArraySpec([2, 3], "uint8", minimum=0, maximum=250, name="camera"),
    "reward": diskbuf.ArraySpec([], "float32"),
    "is_last": diskbuf.ArraySpec([], "bool"),
    "pair": Pair(diskbuf.ArraySpec([], "int64"), diskbuf.ArraySpec([2], "float16")),
    "nested": {
        "a/b": diskbuf.ArraySpec([], "uint16"),
        "..": (diskbuf.ArraySpec([1], "complex64"), [diskbuf.ArraySpec([], "int8")]),
        "zarr.json": {"größe %": diskbuf.ArraySpec([], "float64"), "": diskbuf.ArraySpec([], "uint64")},
    },
}


def steps(first_id: int, next_id: int) -> Any:
    """The steps of all lanes from an id up to another, with leaves [B, T, *shape]."""
    ids, lanes = np.arange(first_id, next_id)[None], np.arange(LANES)[:, None]
    number: NDArray[Any] = ids * 10 + lanes
    return {
        "camera": (number[..., None, None] + np.arange(6).reshape(2, 3)).astype("uint8"),
        "reward": (number / 4).astype("float32"),
        "is_last": ids % 5 + lanes == 4,
        "pair": Pair(number - 2**40, np.stack([number / 2, -number], axis=-1).astype("float16")),
        "nested": {
            "a/b": (number * 300).astype("uint16"),
            "..": ((number[..., None] * (1 - 0.5j)).astype("complex64"), [(100 - number).astype("int8")]),
            "zarr.json": {"größe %": number / 3, "": number.astype("uint64") + np.uint64(2**63)},
        },
    }


def make(path: Path, *, keep_history: bool, **layout: Any) -> None:
    """Makes a store in two runs, in which the ring wraps."""
    options = diskbuf.StoreOptions(chunk_bytes=64, **layout)
    for first_id, next_id in zip(RUN_STARTS, (*RUN_STARTS[1:], NEXT_ID), strict=True):
        with diskbuf.UniformReplayBuffer(
            SPEC, LANES, RING_LENGTH, path=path, keep_history=keep_history, metadata=METADATA, options=options
        ) as buffer:
            buffer.extend(steps(first_id, next_id))
    header = path / ".diskbuf" / "live"
    page = bytearray(header.read_bytes())
    page[BOOT_ID] = bytes(range(16))  # what any other machine finds; without it the one that made it would differ
    header.write_bytes(page)


def main() -> None:
    """Makes the stores of a format below the folder that the command line names."""
    folder = Path(sys.argv[1])
    if folder.exists():
        raise SystemExit(f"{folder} is there already. A golden store is made once and then kept as it is.")
    try:
        for name, layout in FORMATS[folder.name].items():
            make(folder / name, keep_history=name.startswith("history"), **layout)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
