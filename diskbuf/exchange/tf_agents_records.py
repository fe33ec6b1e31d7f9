"""The record files of TF-Agents' `TFRecordObserver`: read, not written."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import ID, LANE, Carried, Format, RowSource, SourceColumn
from diskbuf.exchange.places import local_file
from diskbuf.exchange.protobuf_wire import WireError
from diskbuf.exchange.tensor_specs import spec_of_structure
from diskbuf.exchange.tf_example import ExampleReader
from diskbuf.exchange.tf_record import read_blocks, read_records
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure

_BLOCK_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFAgentsRecordsFormat(Format):
    """Files that TF-Agents' `TFRecordObserver` wrote: a record for each row, and their spec beside them.

    The rows become those of a store with one lane as they are, of the spec in NAME.spec. Images that the observer has
    compressed are refused: JPEG doesn't give back what was seen.
    """

    name: ClassVar[str] = "tf-agents"

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> "TFAgentsRecords":
        """Opens a record file."""
        return TFAgentsRecords(str(local_file(place, storage_options)))


class TFAgentsRecords(RowSource):
    """The rows of a record file.

    Args:
        path: The file; its spec is in the file of the same name with `.spec` behind it.

    Raises:
        OptionError: When there is no spec beside it.
        SpecError: When the spec can't be read.
        OSError: When a file can't be read.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        spec = _spec_beside(path)
        structure = Structure(spec)
        leaves: dict[str, ArraySpec] = dict(zip(structure.paths, structure.flatten(spec), strict=True))
        if not leaves or {ID, LANE}.intersection(leaves):
            raise SpecError(f"{path} must have leaves, none of them called {ID} or {LANE}, got {list(leaves)}.")
        self.columns = {
            name: SourceColumn(spec=leaf, kind=f"{leaf.dtype} {list(leaf.shape)}") for name, leaf in leaves.items()
        }
        self.columns |= {name: SourceColumn(spec=ArraySpec((), np.int64), kind="int64") for name in (ID, LANE)}
        self.carried = Carried(
            spec=spec,
            names={name: name for name in leaves},
            lanes=(0,),
            batch_size=1,
            first_id=0,
            window_first_id=0,
            runs=(0,),
            max_length=None,
            keep_history=False,
            metadata=None,
            is_grid=True,
        )

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields the rows in order."""
        leaves = {name: spec for name in wanted if name not in (ID, LANE) and (spec := self.columns[name].spec)}
        reader = ExampleReader(leaves)
        for first, records in read_blocks(self.name, _BLOCK_BYTES):
            found = reader.read(records, first=first, name=self.name)
            keys = {ID: np.arange(first, first + len(records)), LANE: np.zeros(len(records), np.int64)}
            yield {name: found[name] if name in found else keys[name] for name in wanted}


def _spec_beside(path: str) -> Any:
    beside = f"{path}.spec"
    if not Path(beside).is_file():
        raise OptionError(
            f"{path} must have its spec beside it, in {beside}, as TF-Agents' TFRecordObserver leaves it. "
            "Copy that file too, or name the format of this one."
        )
    with contextlib.closing(read_records(beside)) as records:
        record = next(records, None)
    try:
        if record is None:
            raise WireError("it is empty")
        return spec_of_structure(record)
    except (WireError, SpecError, TypeError) as error:
        raise SpecError(f"{beside} must be the spec of a record file, but {error}.") from error
