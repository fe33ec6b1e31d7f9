"""The manifest: what a store is, as JSON in the attributes of its zarr group; written with the zarr metadata.

It is there twice. ``zarr.json`` counts; the copy in ``.diskbuf/manifest.json`` is what `diskbuf.repair` makes it anew
from. Once a store is made, each commit writes the copy before ``zarr.json``: both are true then, and a crash in between
leaves a copy that is one commit ahead, never one that lacks a run of the other. Both carry a checksum. A manifest
without one was written before there were any.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diskbuf.errors import StoreCorruptError, StoreFormatError, StoreNotFoundError
from diskbuf.store import files
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.chunk_formats import chunk_format_of
from diskbuf.store.layout import COPYING_FILE, STATE_FOLDER, ColumnLayout

FORMAT = 2
"""The newest format. A store is written in the oldest one that can say what it is: 1 for chunks that are raw files."""

ZARR_JSON = "zarr.json"
COPY_FILE = "manifest.json"
_CHECKSUM = "diskbuf_crc32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store is and holds as of a commit.

    Attributes:
        kind: Which buffer made it.
        spec: The data_spec as JSON; the store doesn't read it.
        batch_size: Number of lanes.
        max_length: Longest window, None when everything stays in it.
        keep_history: Whether rows that leave the window stay on disk.
        chunk_rows: Ids in a chunk, by column.
        generation: How many times the store was cleared.
        first_id: Start of the window at the commit.
        next_id: End of the window at the commit.
        oldest_id: First id on disk, where history is kept.
        runs: First id of each run that wrote rows, ascending.
        created: When the store was made, ISO 8601 in UTC.
        metadata: The user's own JSON.
        package_version: The diskbuf that wrote the manifest.
        layout: How chunks that are full are stored, "zarr" or "arrow".
        codec: How they are compressed, None for not at all; see `chunk_formats.codecs`.
        published_to: URL that has chunks which are no longer here; None where all are. Since format 2.
    """

    kind: str
    spec: Any
    batch_size: int
    max_length: int | None
    keep_history: bool
    chunk_rows: dict[str, int]
    generation: int
    first_id: int
    next_id: int
    oldest_id: int
    runs: tuple[int, ...]
    created: str
    metadata: Any
    package_version: str
    layout: str = "zarr"
    codec: dict[str, Any] | None = None
    published_to: str | None = None

    @property
    def is_sealed(self) -> bool:
        """Whether chunks that are full are stored otherwise than as the raw files that they were."""
        return (self.layout, self.codec, self.published_to) != ("zarr", None, None)

    @property
    def format(self) -> int:
        """Version of the store's format."""
        return 2 if self.is_sealed else 1

    def chunk_format(self, layouts: Sequence[ColumnLayout]) -> ChunkFormat:
        """How the store's chunks are stored, for its columns in spec order; objects with a place for it carry this.

        Raises:
            StoreFormatError: When this version doesn't know the layout or the codec.
        """
        carried = {b"diskbuf": json.dumps(self.to_json(), ensure_ascii=False).encode()}
        return chunk_format_of(layouts, layout=self.layout, codec=self.codec, metadata=carried)

    def to_json(self) -> dict[str, Any]:
        """The manifest as a JSON object."""
        value = dataclasses.asdict(self) | {"runs": list(self.runs), "format": self.format}
        if self.format == 1:
            del value["published_to"]
        return value

    @classmethod
    def from_json(cls, value: Any, *, path: Path | str) -> "Manifest":
        """Reads a manifest back.

        Args:
            value: What `to_json` gave.
            path: The file it came from, for messages.

        Returns:
            The manifest.

        Raises:
            StoreFormatError: When a newer version wrote it, or it isn't whole.
        """
        written = value.get("format") if isinstance(value, dict) else None
        if isinstance(written, int) and written > FORMAT:
            raise StoreFormatError(
                f"store format must be at most {FORMAT}, which diskbuf of this version reads, got {written} in {path}, "
                f"written by diskbuf {value.get('package_version')}. Update diskbuf.",
                path=str(path),
                is_newer=True,
            )
        names = {field.name for field in dataclasses.fields(cls)} | {"format"}
        if written == 1:
            names -= {"published_to"}
        if not isinstance(value, dict) or set(value) != names or type(written) is not int or written < 1:
            raise _not_whole(path, f"has {sorted(value)}" if isinstance(value, dict) else f"is {type(value).__name__}")
        value = {name: entry for name, entry in value.items() if name != "format"}
        manifest = cls(**{**value, "runs": tuple(value["runs"]) if isinstance(value["runs"], list) else value["runs"]})
        manifest._check(path)
        if written < manifest.format:
            raise _not_whole(path, f"says format {written}, which has no layout {manifest.layout!r} with a codec")
        return manifest

    def _check(self, path: Path | str) -> None:
        counts = (
            self.batch_size,
            self.generation,
            self.first_id,
            self.next_id,
            self.oldest_id,
            *_items(self.runs),
            *_values(self.chunk_rows),
        )
        if not all(type(count) is int and count >= 0 for count in counts):
            raise _not_whole(path, "has a count that isn't a whole number of at least 0")
        if (
            self.batch_size < 1
            or not self.first_id <= self.next_id
            or not all(_is_power_of_two(n) for n in self.chunk_rows.values())
        ):
            raise _not_whole(path, "has counts that contradict each other")
        if self.max_length is not None and (type(self.max_length) is not int or self.max_length < 1):
            raise _not_whole(path, f"has max_length {self.max_length!r}")
        if (
            self.layout not in {"zarr", "arrow"}
            or not isinstance(self.codec, dict | None)
            or not isinstance(self.published_to, str | None)
            or type(self.keep_history) is not bool
        ):
            raise _not_whole(
                path, f"has layout {self.layout!r}, codec {self.codec!r}, keep_history {self.keep_history!r}"
            )


def read_manifest(store: Path) -> Manifest:
    """Reads the manifest of the store at a path.

    Args:
        store: The store's folder.

    Returns:
        The manifest.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreCorruptError: When its zarr.json can't be read, isn't JSON, or isn't what was written.
        StoreFormatError: When a newer version wrote it, or the manifest isn't whole.
    """
    path = store / ZARR_JSON
    advice = "Run diskbuf.repair" if has_copy(store) else "Restore that file"
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if (store / STATE_FOLDER / COPYING_FILE).exists():
            raise StoreNotFoundError(
                f"cannot open {store}: it is a copy that isn't finished. Run diskbuf.copy again, which goes on.",
                path=str(store),
            ) from error
        if has_copy(store) or ((store / STATE_FOLDER).is_dir() and any(store.rglob("c.*"))):
            raise StoreCorruptError(
                f"{path} must hold the store's manifest, but is missing. {advice}; "
                "without it nothing tells what the chunk files beside it hold.",
                path=str(path),
            ) from error
        what = "there is nothing at that path" if not store.exists() else f"it is no store, {path} is missing"
        raise StoreNotFoundError(
            f"cannot open {store}: {what}. Check the path; diskbuf.UniformReplayBuffer(..., path=...) makes a store.",
            path=str(store),
        ) from error
    except OSError as error:
        raise StoreCorruptError(
            f"{path} must be a file that can be read, got {error.strerror}. {advice}.", path=str(path)
        ) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(
            f"{path} must be JSON, got {len(text)} bytes that are not ({error}). "
            f"{advice}; the rows are in the chunk files beside it.",
            path=str(path),
        ) from error
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or "diskbuf" not in attributes:
        if has_copy(store):
            raise StoreCorruptError(f"{path} must hold the store's manifest, but doesn't. {advice}.", path=str(path))
        raise StoreNotFoundError(
            f"cannot open {store}: its zarr.json is not one of diskbuf's. Give the path of a diskbuf store.",
            path=str(store),
        )
    return _checked(attributes, path=path, advice=advice)


def manifest_in(text: bytes, *, place: str) -> Manifest:
    """Reads the manifest in a zarr.json that came from a remote store.

    Args:
        text: The object.
        place: Its URL.

    Returns:
        The manifest.

    Raises:
        StoreNotFoundError: When it isn't one of diskbuf's.
        StoreCorruptError: When it isn't JSON, or isn't what was written.
        StoreFormatError: When a newer version wrote it, or it isn't whole.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(
            f"{place} must be JSON, got {len(text)} bytes that are not ({error}). Publish the store again.", path=place
        ) from error
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or "diskbuf" not in attributes:
        raise StoreNotFoundError(
            f"cannot open {place}: it is not one of diskbuf's. Give the URL of a diskbuf store.", path=place
        )
    return _checked(attributes, path=place, advice="Publish the store again")


def read_copy(store: Path) -> Manifest | None:
    """Reads the copy of a store's manifest.

    Args:
        store: The store's folder.

    Returns:
        The manifest as of the last commit or the one that was under way; None when there is no copy.

    Raises:
        StoreCorruptError: When the copy can't be read, isn't JSON, or isn't what was written.
        StoreFormatError: When a newer version wrote it, or it isn't whole.
    """
    path = _copy_path(store)
    advice = "Run diskbuf.repair"
    if not has_copy(store):
        return None
    try:
        attributes = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise StoreCorruptError(
            f"{path} must hold a copy of the manifest, but can't be read: {what}. {advice}.", path=str(path)
        ) from error
    if not isinstance(attributes, dict) or not {"diskbuf", _CHECKSUM} <= set(attributes):
        raise StoreCorruptError(
            f"{path} must hold a copy of the manifest and its checksum, but doesn't. {advice}.", path=str(path)
        )
    return _checked(attributes, path=path, advice=advice)


def has_copy(store: Path) -> bool:
    """Whether there is something in the place of the manifest's copy: only where the store was once whole."""
    return os.path.lexists(_copy_path(store))


def promises_copy(store: Path) -> bool:
    """Whether the zarr.json of a store, which can be read, was written together with a copy of its manifest."""
    attributes = json.loads((store / ZARR_JSON).read_bytes())["attributes"]
    return _CHECKSUM in attributes and bool(attributes["diskbuf"]["runs"])  # a store that was only made has no runs


def _copy_path(store: Path) -> Path:
    return store / STATE_FOLDER / COPY_FILE


def _attributes_of(manifest: Manifest) -> dict[str, Any]:
    value = manifest.to_json()
    return {"diskbuf": value, _CHECKSUM: _checksum_of(value)}


def _checksum_of(value: Any) -> str:
    """CRC-32 (as in zlib) of the JSON, however a program that rewrote the file has spaced and ordered it."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _checked(attributes: dict[str, Any], *, path: Path | str, advice: str) -> Manifest:
    value = attributes["diskbuf"]
    try:
        found = _checksum_of(value)
    except RecursionError:
        found = "none"
    if _CHECKSUM in attributes and attributes[_CHECKSUM] != found:
        raise StoreCorruptError(
            f"manifest in {path} must have checksum {attributes[_CHECKSUM]!s:.20}, has {found}: it was changed after "
            f"it was written. {advice}.",
            path=str(path),
        )
    return Manifest.from_json(value, path=path)


class ZarrMetadata:
    """The zarr.json files of a store: one per column and group, and the root's, which also carries the manifest.

    The root's is replaced last, so a manifest never counts rows that the arrays beside it don't have; the copy of the
    manifest goes right before it.

    Args:
        store: The store's folder.
        documents: The zarr documents of its arrays by file path; a layout that isn't zarr's has none.
    """

    def __init__(self, store: Path, documents: dict[str, Any]) -> None:
        self.store = store
        self._arrays = documents

    @classmethod
    def read(cls, store: Path, columns: list[ColumnLayout]) -> "ZarrMetadata":
        """Takes the documents that are on disk.

        Raises:
            StoreCorruptError: When one is missing or isn't JSON.
        """
        documents = {}
        for column in columns:
            path = store / column.file_path / ZARR_JSON
            try:
                document = json.loads(path.read_bytes())
                document["shape"][0]
                documents[column.file_path] = document
            except (OSError, ValueError, RecursionError, TypeError, LookupError) as error:
                raise StoreCorruptError(
                    f"{path} must be a zarr array's metadata, got {error}. Restore that file.", path=str(path)
                ) from error
        return cls(store, documents)

    def create(self, *, sync: bool) -> None:
        """Makes the folders of all columns and groups and the groups' documents."""
        for file_path in self._arrays:
            (self.store / file_path).mkdir(parents=True, exist_ok=True)
        for name, data in self.group_files():
            files.replace_file(self.store / name, data, sync=sync)
            if sync:
                files.sync_folder((self.store / name).parent)

    def commit(self, manifest: Manifest, *, sync: bool, with_copy: bool = True, length: int | None = None) -> None:
        """Writes the arrays' lengths and then the manifest.

        Args:
            manifest: What the store is and holds.
            sync: Whether it is on the disk when this returns.
            length: Length of the arrays; None for all that the manifest counts.
            with_copy: Whether the manifest's copy is written too; not while the store is being made, so that a copy
                without zarr.json always tells of a store that lost it.

        Raises:
            OSError: When a file can't be written; each file is then the old one or the new one.
        """
        for name, data in self.files(manifest, length=length, with_copy=with_copy):
            files.replace_file(self.store / name, data, sync=sync)

    def files(
        self, manifest: Manifest, *, length: int | None = None, with_copy: bool = True
    ) -> Iterator[tuple[str, bytes]]:
        """Yields (name, content) of the files that change with a commit, in the order in which they must be written."""
        root = self.root_document(manifest, length=length)
        for file_path, document in self._arrays.items():
            yield f"{file_path}/{ZARR_JSON}", _dump(document)
        if with_copy:
            yield f"{STATE_FOLDER}/{COPY_FILE}", _dump(_attributes_of(manifest))
        yield ZARR_JSON, _dump(root)

    def group_files(self) -> Iterator[tuple[str, bytes]]:
        """Yields (name, content) of the groups between the root and the columns, which never change."""
        for group in self._groups():
            yield f"{group}/{ZARR_JSON}", _dump(group_document())

    def root_document(self, manifest: Manifest, *, length: int | None = None) -> dict[str, Any]:
        """The zarr v3 metadata of the store's group; the arrays' lengths are then `length`, or the manifest's."""
        for document in self._arrays.values():
            document["shape"][0] = manifest.next_id if length is None else length
        members = {group: group_document() for group in self._groups()} | self._arrays
        return group_document() | {
            "attributes": _attributes_of(manifest),
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": dict(sorted(members.items())),
            },
        }

    def remove_temporaries(self) -> None:
        """Removes what a process killed while it replaced a document may have left."""
        for folder in (*self._arrays, *self._groups(), ""):
            files.temporary_of(self.store / folder / ZARR_JSON).unlink(missing_ok=True)
        files.temporary_of(_copy_path(self.store)).unlink(missing_ok=True)

    def _groups(self) -> list[str]:
        """Paths of the groups between the root and the columns, outer ones first."""
        found = {parent.as_posix() for file_path in self._arrays for parent in Path(file_path).parents}
        return sorted(found - {"."})


def group_document() -> dict[str, Any]:
    """The zarr v3 metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1).encode()


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (None,)


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value.values()) if isinstance(value, dict) else (None,)


def _is_power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def _not_whole(path: Path | str, what: str) -> StoreFormatError:
    return StoreFormatError(
        f"manifest in {path} must be a whole one of format {FORMAT}, but it {what}. Restore that file, "
        "or run diskbuf.repair.",
        path=str(path),
    )
