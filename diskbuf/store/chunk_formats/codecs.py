"""Codecs as the user names them, as the manifest keeps them, and as zarr writes them into an array's metadata.

The manifest's JSON is made once for all columns. What depends on a column's dtype is left out of it and filled in for
each: the byte order of "bytes", and typesize and shuffle of "blosc".
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diskbuf.errors import OptionError, StoreFormatError
from diskbuf.store.layout import ColumnLayout

if TYPE_CHECKING:
    from zarr.abc.codec import Codec

INNER_BYTES = 2**18
"""Most bytes of an inner chunk before it is compressed, where the user doesn't say how many ids it has."""

BYTES, BLOSC, ZSTD, CRC32C = "bytes", "blosc", "zstd", "crc32c"
INDEX_CODECS = (
    {"name": BYTES, "configuration": {"endian": "little"}},
    {"name": CRC32C},
)
"""Codecs of a shard's index, as zarr-python writes it by default."""

_ZARR_NAMES = ("zstd", "blosc", "lz4")
_ARROW_NAMES = ("zstd", "lz4")
_LEVELS = {
    ("zarr", "zstd"): (-131072, 22),
    ("zarr", "blosc"): (0, 9),
    ("zarr", "lz4"): (0, 9),
    ("arrow", "zstd"): (-131072, 22),
    ("arrow", "lz4"): (1, 12),
}
_MOST_BLOSC_BYTES = 2**31 - 17  # BLOSC_MAX_BUFFERSIZE: an int's largest value less the header of 16 bytes


def codec_json(
    layout: str, codec: Any, *, level: int | None, inner_rows: int | None, layouts: Sequence[ColumnLayout]
) -> dict[str, Any] | None:
    """Returns what the manifest says of the codec.

    Args:
        layout: "zarr" or "arrow".
        codec: What the user gives: None, a name, or for "zarr" a zarr codec object or several.
        level: How hard a codec that is named tries; None for its usual level.
        inner_rows: Ids in an inner chunk of a shard; None for the largest power of two within `INNER_BYTES`.
        layouts: The columns.

    Returns:
        For "zarr" ``{"codecs": [zarr v3 codec JSON of the inner chunks], "inner_rows": {file path: ids}}``, for
        "arrow" ``{"compression": name, "level": level}``, None without a codec.

    Raises:
        OptionError: When an argument is outside its rule, or a codec object doesn't give every value back as it was.
    """
    if layout not in ("zarr", "arrow"):
        raise OptionError(f"layout must be 'zarr' or 'arrow', got {layout!r}.")
    if codec is None:
        for name, value in (("level", level), ("inner_rows", inner_rows)):
            if value is not None:
                raise OptionError(f"{name} must be left out without a codec, got {value!r}. Name a codec.")
        return None
    if layout == "arrow":
        if inner_rows is not None:
            raise OptionError(f"inner_rows must be left out with layout 'arrow', got {inner_rows!r}.")
        if not isinstance(codec, str) or codec not in _ARROW_NAMES:
            raise OptionError(
                f"codec must be one of {_listed(_ARROW_NAMES)} with layout 'arrow', got {codec!r}. "
                "Leave it out for none."
            )
        return {"compression": codec, "level": _checked_level(level, layout, codec)}
    made: dict[str, Any]
    if isinstance(codec, str):
        made = {"codecs": _named_chain(codec, level), "inner_rows": _inner_rows(inner_rows, layouts)}
    else:
        codecs = _codec_objects(codec)
        if level is not None:
            raise OptionError(
                f"level must be left out with codec objects, got {level!r}. Give it to the codec when you make it."
            )
        made = {"codecs": _chain_of(codecs), "inner_rows": _inner_rows(inner_rows, layouts)}
        _check_that_values_come_back(made, layouts)
    for column in layouts:
        inner_bytes = made["inner_rows"][column.file_path] * column.row_bytes
        if inner_bytes > _MOST_BLOSC_BYTES and any(item["name"] == BLOSC for item in made["codecs"]):
            raise OptionError(
                f"inner chunks must be at most {_MOST_BLOSC_BYTES} bytes for blosc, got {inner_bytes} for leaf "
                f"{column.path!r}. Use codec='zstd'."
            )
    return made


def array_codecs(column: ColumnLayout, codec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the codecs of a column's inner chunks, complete, as they stand in its zarr metadata.

    Args:
        column: The column.
        codec: What `codec_json` made.
    """
    return [_fitted(item, column.dtype) for item in codec["codecs"]]


def check_codec(codec: Mapping[str, Any], layouts: Sequence[ColumnLayout]) -> None:
    """Checks the JSON of a zarr codec that was read from a manifest.

    Raises:
        StoreFormatError: When it isn't what `codec_json` makes, or names a codec that isn't known here.
    """
    chain, inner_rows = codec.get("codecs"), codec.get("inner_rows")
    if not isinstance(chain, list) or not isinstance(inner_rows, Mapping):
        raise StoreFormatError(f"the codec of a store must have 'codecs' and 'inner_rows', got {dict(codec)!r}.")
    for item in chain:
        name = item.get("name") if isinstance(item, Mapping) else None
        if not isinstance(name, str):
            raise StoreFormatError(f"a codec must be an object with a name, got {item!r}.")
        if name not in (BYTES, BLOSC, ZSTD, CRC32C) and not _is_known(name):
            raise StoreFormatError(
                f"the codec of a store must be one that zarr knows here, got {name!r}. Install the package that has it."
            )
    for column in layouts:
        rows = inner_rows.get(column.file_path)
        if not isinstance(rows, int) or rows < 1 or column.chunk_rows % rows:
            raise StoreFormatError(
                f"inner_rows of {column.file_path!r} must divide its {column.chunk_rows} ids in a chunk, got {rows!r}."
            )


def check_compression(codec: Mapping[str, Any] | None) -> tuple[str | None, int | None]:
    """Checks the JSON of an Arrow codec that was read from a manifest.

    Returns:
        Its name as Arrow has it, and its level; None for none.

    Raises:
        StoreFormatError: When it isn't what `codec_json` makes.
    """
    if codec is None:
        return None, None
    name, level = codec.get("compression"), codec.get("level")
    if name not in _ARROW_NAMES:
        raise StoreFormatError(
            f"the codec of a store of Arrow files must be one of {_listed(_ARROW_NAMES)}, got {name!r}. "
            "Open it with a newer diskbuf."
        )
    if level is not None and not isinstance(level, int):
        raise StoreFormatError(f"the level of a codec must be an int or null, got {level!r}.")
    return name, level


def inner_rows_of(column: ColumnLayout) -> int:
    """Ids in an inner chunk: the largest power of two within `INNER_BYTES` and the chunk, at least 1."""
    rows = 1
    while rows * 2 <= column.chunk_rows and rows * 2 * column.row_bytes <= INNER_BYTES:
        rows *= 2
    return rows


def zarr_codecs(chain: Sequence[Mapping[str, Any]]) -> "list[Codec]":
    """Returns zarr-python's codec objects of a complete chain."""
    from zarr.registry import get_codec_class

    return [get_codec_class(item["name"]).from_dict(dict(item)) for item in chain]


def split_codecs(codecs: "Sequence[Codec]") -> dict[str, Any]:
    """Returns codecs as the arguments of `zarr.create_array` that take them."""
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec

    serializers = [codec for codec in codecs if isinstance(codec, ArrayBytesCodec)]
    return {
        "filters": [codec for codec in codecs if isinstance(codec, ArrayArrayCodec)] or None,
        "serializer": serializers[0] if serializers else "auto",
        "compressors": [codec for codec in codecs if isinstance(codec, BytesBytesCodec)] or None,
    }


def _named_chain(name: str, level: int | None) -> list[dict[str, Any]]:
    """The chain of a codec that the user names. zstd keeps a checksum of its own, so damage is found.

    zarr's crc32c would do that for all of them, but bytes with their own CRC-32C behind them have the same CRC-32C
    whatever they are: the store's checksum of such a shard would tell no more than how long its parts are.
    """
    if name not in _ZARR_NAMES:
        raise _unknown(name)
    level = _checked_level(level, "zarr", name)
    if name == "zstd":
        packed = {"name": ZSTD, "configuration": {"level": 0 if level is None else level, "checksum": True}}
    else:  # zarr's "lz4" is not in TensorStore; LZ4 inside blosc is in both
        cname = "zstd" if name == "blosc" else "lz4"
        packed = {
            "name": BLOSC,
            "configuration": {"cname": cname, "clevel": 5 if level is None else level, "blocksize": 0},
        }
    return [{"name": BYTES}, packed]


def _checked_level(level: int | None, layout: str, name: str) -> int | None:
    if level is None:
        return None
    least, most = _LEVELS[layout, name]
    if isinstance(level, bool) or not isinstance(level, int) or not least <= level <= most:
        raise OptionError(
            f"level must be an int from {least} to {most} for {name!r}, got {level!r}. Leave it out for the usual one."
        )
    return level


def _inner_rows(given: int | None, layouts: Sequence[ColumnLayout]) -> dict[str, int]:
    if given is None:
        return {column.file_path: inner_rows_of(column) for column in layouts}
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or given.bit_count() != 1:
        raise OptionError(f"inner_rows must be a power of two, got {given!r}. Leave it out for about 256 KiB.")
    for column in layouts:
        if given > column.chunk_rows:
            raise OptionError(
                f"inner_rows must be at most the {column.chunk_rows} ids in a shard of leaf {column.path!r}, "
                f"got {given!r}. Leave it out, or give a larger shard_bytes."
            )
    return {column.file_path: given for column in layouts}


def _codec_objects(given: Any) -> "list[Codec]":
    """The codec objects the user gives, one or several, of which at most one makes bytes of an array."""
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec

    codecs = list(given) if isinstance(given, Sequence) else [given]
    for codec in codecs:
        if not isinstance(codec, ArrayArrayCodec | ArrayBytesCodec | BytesBytesCodec):
            raise _unknown(codec)
    order = (ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec)
    places = [next(place for place, kind in enumerate(order) if isinstance(codec, kind)) for codec in codecs]
    if not codecs or places != sorted(places) or places.count(1) > 1:
        raise OptionError(
            "codec must have array codecs first, at most one that makes bytes of them, and bytes codecs last, "
            f"got {given!r}."
        )
    return codecs


def _chain_of(codecs: "Sequence[Codec]") -> list[dict[str, Any]]:
    """The JSON of codec objects, with "bytes" in its place where the user leaves it to us."""
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec
    from zarr.codecs import BloscCodec

    chain: list[dict[str, Any]] = []
    for codec in codecs:
        item: dict[str, Any] = dict(codec.to_dict())
        if isinstance(codec, BloscCodec):
            tuned = _what_zarr_tunes(codec)
            item["configuration"] = {key: value for key, value in item["configuration"].items() if key not in tuned}
        chain.append(item)
    if not any(isinstance(codec, ArrayBytesCodec) for codec in codecs):
        place = sum(isinstance(codec, ArrayArrayCodec) for codec in codecs)
        chain.insert(place, {"name": BYTES})
    return chain


def _what_zarr_tunes(codec: "Codec") -> set[str]:
    """Which settings of a blosc codec zarr makes to fit the dtype, since the user didn't say."""
    import zarr
    from zarr.storage import MemoryStore

    fitted: list[dict[str, Any]] = []
    for dtype in ("uint8", "float64"):
        compressors: Any = [codec]
        array = zarr.create_array(MemoryStore(), shape=(1,), dtype=dtype, compressors=compressors)
        document: Any = array.metadata.to_dict()
        fitted.append(document["codecs"][-1]["configuration"])
    return {key for key in fitted[0] if fitted[0][key] != fitted[1][key]}


def _fitted(item: Mapping[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Fills in what was left out of a codec's JSON."""
    configuration = dict(item.get("configuration", {}))
    if item["name"] == BYTES:
        if dtype.itemsize > 1:
            configuration.setdefault("endian", sys.byteorder)
        else:
            configuration.pop("endian", None)  # single bytes have none
    if item["name"] == BLOSC:
        # Of single bytes, shuffling their bits makes frames of games larger and slower to read; zarr would.
        configuration.setdefault("typesize", dtype.itemsize)
        configuration.setdefault("shuffle", "noshuffle" if dtype.itemsize == 1 else "shuffle")
    return {"name": item["name"], "configuration": configuration} if configuration else {"name": item["name"]}


def _is_known(name: str) -> bool:
    from zarr.registry import get_codec_class

    try:
        get_codec_class(name)
    except (KeyError, ValueError, ImportError):  # zarr's own error for it has been each of these
        return False
    return True


def _check_that_values_come_back(made: Mapping[str, Any], layouts: Sequence[ColumnLayout]) -> None:
    """Writes and reads random rows of each column; a codec that rounds them is refused."""
    import zarr
    from zarr.storage import MemoryStore

    rng = np.random.default_rng(0)
    for column in layouts:
        shape = (min(made["inner_rows"][column.file_path], 8), column.lanes, *(max(1, size) for size in column.shape))
        if column.dtype.kind == "b":
            values = rng.integers(0, 2, shape).astype(bool)
        else:
            raw = rng.integers(0, 256, math.prod(shape) * column.dtype.itemsize, np.uint8)
            values = raw.view(column.dtype).reshape(shape)
        try:
            codecs = split_codecs(zarr_codecs(array_codecs(column, made)))
            array = zarr.create_array(
                MemoryStore(), shape=shape, chunks=shape, dtype=column.dtype, fill_value=0, **codecs
            )
            array[...] = values
            found = np.asarray(array[...])
        except Exception as error:  # a codec may fail in any way
            raise OptionError(
                f"codec must take leaf {column.path!r}, {column.dtype} {list(column.shape)}, but fails: "
                f"{str(error).rstrip('.')}. Use codec='zstd', or another codec."
            ) from error
        if found.dtype != values.dtype or found.tobytes() != values.tobytes():
            raise OptionError(
                f"codec must give back every value as it was, but doesn't for leaf {column.path!r}, {column.dtype}. "
                "Use codec='zstd', or another codec."
            )


def _unknown(codec: Any) -> OptionError:
    return OptionError(
        f"codec must be one of {_listed(_ZARR_NAMES)} or zarr codec objects, got {codec!r}. "
        "Leave it out for no compression."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def codec_name(codec: Mapping[str, Any] | None) -> str:
    """What to call the codec of a manifest: the names of what compresses, "none" without one."""
    if codec is None:
        return "none"
    if "compression" in codec:
        return str(codec["compression"])
    names = []
    for part in codec.get("codecs", ()):
        name, settings = part.get("name"), part.get("configuration") or {}
        if name == BLOSC and settings.get("cname") == "lz4":
            name = "lz4"
        names += [] if name == BYTES else [str(name)]
    return " ".join(names) or BYTES
