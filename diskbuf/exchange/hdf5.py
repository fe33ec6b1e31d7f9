"""HDF5: a dataset a leaf, in groups as the leaves are nested."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import MissingExtraError, OptionError
from diskbuf.exchange.arrays import ArraySource, Axes, StoredArray, array_names, check_axes
from diskbuf.exchange.contract import CARRIED_KEY, ID, LANE, Format, RowSource, Target
from diskbuf.exchange.places import local_file, naming_damage
from diskbuf.exchange.store_rows import StoreRows

_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hdf5Format(Format):
    """An HDF5 file: a dataset [T, B, *shape] a leaf, `id` [T] and `lane` [B], with checksums that reading it compares.

    Attributes:
        compression: Of the datasets: "none", "gzip" or "lzf".
        level: How hard gzip tries, 0 to 9; None for its usual level.
        axes: What the first axes of a foreign file's datasets are: "rows", "lanes,steps" or "steps,lanes".

    Raises:
        OptionError: When an option is outside its rule.
    """

    compression: str = "none"
    level: int | None = None
    axes: Axes = "rows"

    name: ClassVar[str] = "hdf5"
    endings: ClassVar[tuple[str, ...]] = (".h5", ".hdf5")
    carries: ClassVar[bool] = True
    extra: ClassVar[str | None] = "hdf5"

    def __post_init__(self) -> None:
        if self.compression not in ("none", "gzip", "lzf"):
            raise OptionError(f"compression must be one of none, gzip, lzf, got {self.compression!r}.")
        if self.level is not None and (
            type(self.level) is not int or not 0 <= self.level <= 9 or self.compression != "gzip"
        ):
            raise OptionError(f"level must be an int from 0 to 9, for gzip alone, got {self.level!r}.")
        check_axes(self.axes)

    def export(self, rows: StoreRows, target: Target) -> None:
        """Writes a file; datasets grow as rows come."""
        h5py = _h5py()
        rows.check_is_grid()
        lanes = len(rows.lanes)
        target.local_path()  # HDF5 goes back and forth in its file
        with target.open() as opened, telling_of_failure(opened) as sink, h5py.File(sink, "w") as file:
            names = array_names(rows)
            carried_here = dataclasses.replace(rows.carried, names=names)
            carried = json.dumps(carried_here.to_json(), ensure_ascii=False).encode()
            # A dataset and no attribute: attributes are of 64 KiB at most.
            file.create_dataset(CARRIED_KEY, data=np.frombuffer(carried, np.uint8), fletcher32=True)
            file.attrs["writer"] = "diskbuf"
            file.create_dataset(LANE, data=rows.lanes, fletcher32=True)
            chunk = _chunk((), np.dtype(np.int64), rows.next_id - rows.first_id)
            ids = file.create_dataset(ID, (0,), np.int64, maxshape=(None,), chunks=chunk, fletcher32=True)
            shapes = {path: (lanes, *spec.shape) for path, spec in rows.columns.items()}
            datasets = {
                path: file.create_dataset(
                    names[path],
                    (0, *shape),
                    rows.columns[path].dtype,
                    maxshape=(None, *shape),
                    chunks=_chunk(shape, rows.columns[path].dtype, rows.next_id - rows.first_id),
                    compression=None if self.compression == "none" else self.compression,
                    compression_opts=self.level,
                    fletcher32=True,
                )
                for path, shape in shapes.items()
                if 0 not in shape
            }
            done = 0
            sink.check()
            for block in rows.grid_blocks():
                steps = block.next_id - block.first_id
                ids.resize((done + steps,))
                ids[done:] = np.arange(block.first_id, block.next_id)
                for path, dataset in datasets.items():
                    dataset.resize((done + steps, *dataset.shape[1:]))
                    dataset[done:] = block.columns[path].swapaxes(0, 1)
                done += steps
                sink.check()
            for path, shape in shapes.items():
                if 0 in shape:  # nothing to chunk
                    file.create_dataset(names[path], (done, *shape), rows.columns[path].dtype)

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> RowSource:
        """Opens a file; datasets are read from it piece by piece."""
        return _Hdf5Source(local_file(place, storage_options), self.axes)


class Sink:
    """A file for HDF5 that never fails: what fails is kept, and told by us.

    HDF5 can't let go of a file that it couldn't write, and ends the process for it at its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def check(self) -> None:
        """Raises what has failed."""
        if self.failure is not None:
            raise self.failure

    def _do(self, call: Callable[..., int], *arguments: Any) -> int:
        if self.failure is None:
            try:
                return call(*arguments)
            except OSError as error:
                self.failure = error
        return 0

    def write(self, data: Any) -> int:
        """Writes, or lets it be."""
        size = memoryview(data).nbytes
        self._do(self._file.write, data)
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        """Goes to a place."""
        return self._do(self._file.seek, offset, whence)

    def tell(self) -> int:
        """Returns where it is."""
        return self._do(self._file.tell)

    def truncate(self, size: int) -> int:
        """Cuts the file, or makes it longer."""
        return self._do(self._file.truncate, size)

    def read(self, size: int = -1) -> bytes:
        """There because h5py knows a file by it; it reads by `readinto`."""
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        """Reads what is there."""
        return self._do(cast(BufferedRandom, self._file).readinto, buffer)

    def flush(self) -> None:
        """Hands over what is kept back."""
        self._do(lambda: self._file.flush() or 0)


@contextlib.contextmanager
def telling_of_failure(file: BinaryIO) -> Iterator[Sink]:
    """Tells of what has failed when all of HDF5 is closed, whatever it made of that."""
    sink = Sink(file)
    try:
        yield sink
    except Exception as error:
        if sink.failure is not None and error is not sink.failure:
            raise sink.failure from error
        raise
    sink.check()


def _chunk(shape: tuple[int, ...], dtype: np.dtype[Any], steps: int) -> tuple[int, ...]:
    """The chunk of a dataset, in steps as many as make up a MiB."""
    return (max(1, min(steps, _CHUNK_BYTES // (math.prod(shape) * dtype.itemsize))), *shape)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(
            "the format hdf5 must have the package h5py, which isn't installed. pip install 'diskbuf[hdf5]'."
        ) from error
    return h5py


class _Hdf5Source(ArraySource):
    def __init__(self, path: Path, axes: Axes) -> None:
        h5py = _h5py()
        with naming_damage(str(path), "an HDF5 file"):
            self._file = h5py.File(path, "r")
        try:
            arrays: dict[str, StoredArray] = {}

            def take(name: str, item: Any) -> None:
                if isinstance(item, h5py.Dataset):
                    arrays[name] = _Dataset(item, str(path))

            with naming_damage(str(path), "an HDF5 file"):
                self._file.visititems(take)
            super().__init__(str(path), arrays, axes=axes)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()


class _Dataset(StoredArray):
    """A dataset of an HDF5 file."""

    def __init__(self, dataset: Any, path: str) -> None:
        self._dataset = dataset
        self._path = path
        self.shape = dataset.shape if dataset.shape is not None else ()
        try:
            self.dtype = dataset.dtype
        except TypeError as error:  # NumPy has no such type
            self.dtype, self.kind = np.dtype("V1"), f"{error}"
            self.problem = f"a type that NumPy has not ({error})"
            return
        self.kind = f"{self.dtype} {list(self.shape)}"
        if self.dtype.hasobject or dataset.shape is None:
            self.problem = "text, objects or arrays of different lengths, which are never loaded"

    def steps(self, axes: Axes, count: int) -> Iterator[NDArray[Any]]:
        if axes != "lanes,steps":
            for begin in range(0, self.shape[0], count):
                yield self._read(np.s_[begin : begin + count])
            return
        for begin in range(0, self.shape[1], count):
            yield self._read(np.s_[:, begin : begin + count]).swapaxes(0, 1)

    def _read(self, part: Any) -> NDArray[Any]:
        with naming_damage(f"dataset {self._dataset.name} of {self._path}", "whole"):
            return np.asarray(self._dataset[part])
