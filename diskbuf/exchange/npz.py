"""NPZ: a zip file of NumPy arrays, one a leaf."""

import contextlib
import dataclasses
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError, WindowError
from diskbuf.exchange.arrays import ArraySource, Axes, StoredArray, array_names, check_axes
from diskbuf.exchange.contract import CARRIED_KEY, ID, LANE, Format, RowSource, Target
from diskbuf.exchange.places import local_file, naming_damage
from diskbuf.exchange.store_rows import StoreRows

_MOST_TRIES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NpzFormat(Format):
    """An NPZ file: an array [T, B, *shape] a leaf, `id` [T] and `lane` [B].

    It is written leaf by leaf. When a writer evicts rows before all leaves have come, it begins again behind them.
    Arrays of objects are refused: reading them would run code of the file.

    Attributes:
        compressed: Whether arrays are deflated, as by `numpy.savez_compressed`.
        axes: What the first axes of a foreign file's arrays are: "rows", "lanes,steps" or "steps,lanes".

    Raises:
        OptionError: When an option is outside its rule.
    """

    compressed: bool = False
    axes: Axes = "rows"

    name: ClassVar[str] = "npz"
    endings: ClassVar[tuple[str, ...]] = (".npz",)
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.compressed, bool):
            raise OptionError(f"compressed must be True or False, got {self.compressed!r}.")
        check_axes(self.axes)

    def export(self, rows: StoreRows, target: Target) -> None:
        """Writes a file."""
        rows.check_is_grid()
        path = target.local_path()
        for _ in range(_MOST_TRIES):
            if self._write(rows, path):
                return
            first_id, next_id = rows.buffer.first_id, rows.next_id
            # The writer goes on, and must not come along again before all leaves have.
            rows.begin_again(min(next_id, first_id + max(1, (next_id - first_id) // 8)))
        raise WindowError(
            f"rows of {rows.buffer.path} must stay in the window until each leaf is written, but a writer evicted them "
            f"{_MOST_TRIES} times. Copy the store first, or export to Parquet."
        )

    def _write(self, rows: StoreRows, path: Path) -> bool:
        """Writes all arrays; returns whether no row was evicted meanwhile."""
        kind = zipfile.ZIP_DEFLATED if self.compressed else zipfile.ZIP_STORED
        steps = rows.next_id - rows.first_id
        last = list(rows.columns)[-1]
        with zipfile.ZipFile(path, "w", kind, allowZip64=True) as archive:
            _put(archive, ID, np.arange(rows.first_id, rows.next_id))
            _put(archive, LANE, rows.lanes)
            names = array_names(rows)
            carried = dataclasses.replace(rows.carried, names=names)
            text = json.dumps(carried.to_json(), ensure_ascii=False).encode()
            _put(archive, CARRIED_KEY, np.frombuffer(text, np.uint8))
            for leaf, spec in rows.columns.items():
                shape = (steps, len(rows.lanes), *spec.shape)
                expected = rows.first_id
                with _begun(archive, names[leaf], spec.dtype, shape) as member:
                    for block in rows.grid_blocks([leaf], is_counted=leaf == last):
                        if block.first_id != expected:
                            return False
                        expected = block.next_id
                        _write_array(member, block.columns[leaf].swapaxes(0, 1))
                if expected != rows.next_id:
                    return False
        return True

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> RowSource:
        """Opens a file; arrays are read from it piece by piece."""
        return _NpzSource(local_file(place, storage_options), self.axes)


@contextlib.contextmanager
def _begun(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Iterator[IO[bytes]]:
    """Begins an array in the archive, whose elements are then written in C order."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_2_0(member, header)
        yield member


def _put(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    with _begun(archive, name, array.dtype, array.shape) as member:
        _write_array(member, array)


def _write_array(member: IO[bytes], array: NDArray[Any]) -> None:
    if array.nbytes:
        member.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class _NpzSource(ArraySource):
    def __init__(self, path: Path, axes: Axes) -> None:
        with naming_damage(str(path), "an NPZ file"):
            self._archive = zipfile.ZipFile(path)
        try:
            names = member_names(self._archive, str(path))
            arrays = {
                name.removesuffix(".npy"): _Member(self._archive, name, str(path))
                for name in names
                if name.endswith(".npy")
            }
            others = [name for name in names if not name.endswith(".npy")]
            if others:
                raise SpecError(f"{path} must be an NPZ file, which holds arrays alone, got {others[:5]} in it.")
            super().__init__(str(path), arrays, axes=axes)
        except BaseException:
            self._archive.close()
            raise

    def close(self) -> None:
        self._archive.close()


def member_names(archive: zipfile.ZipFile, path: str) -> list[str]:
    """Names what is in an NPZ file.

    Raises:
        SpecError: When something is in it twice, and nobody can tell which one is meant.
    """
    names = archive.namelist()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SpecError(f"{path} must hold each array once, got {', '.join(map(repr, twice[:5]))} more often.")
    return names


class _Member(StoredArray):
    """An array in a zip file."""

    def __init__(self, archive: zipfile.ZipFile, name: str, path: str) -> None:
        self._archive = archive
        self._name = name
        self._path = path
        with naming_damage(f"array {name} of {path}", "whole and of NumPy's format"), archive.open(name) as member:
            self.shape, is_fortran, self.dtype = _header(member)
        self.kind = f"{self.dtype} {list(self.shape)}"
        if self.dtype.hasobject:
            self.problem = "objects, which are never loaded"
        elif is_fortran and len(self.shape) > 1:
            self.problem = "an array in Fortran's order (save it with numpy.ascontiguousarray)"

    def steps(self, axes: Axes, count: int) -> Iterator[NDArray[Any]]:
        if axes != "lanes,steps":
            with self._opened() as member:
                for begin in range(0, self.shape[0], count):
                    yield self._read(member, (min(count, self.shape[0] - begin), *self.shape[1:]))
            return
        lanes, steps, *shape = self.shape
        with contextlib.ExitStack() as stack:  # each lane is read by itself, from where it begins
            members = [stack.enter_context(self._opened()) for _ in range(lanes)]
            for lane, member in enumerate(members):
                member.seek(lane * steps * math.prod(shape) * self.dtype.itemsize, 1)
            for begin in range(0, steps, count):
                size = min(count, steps - begin)
                yield np.stack([self._read(member, (size, *shape)) for member in members], axis=1)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        where = f"array {self._name} of {self._path}"
        with naming_damage(where, "whole and of NumPy's format"), self._archive.open(self._name) as member:
            _header(member)
            yield member

    def _read(self, member: IO[bytes], shape: Sequence[int]) -> NDArray[Any]:
        size = math.prod(shape) * self.dtype.itemsize
        data = member.read(size)
        if len(data) != size:
            raise SpecError(f"array {self._name} of {self._path} must be {self.kind}, but ends before that.")
        return np.frombuffer(data, self.dtype).reshape(shape)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of an array, and nothing that it may want to run.

    Raises:
        ValueError: When it is none.
    """
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"version {version[0]}.{version[1]} of the format isn't known")
