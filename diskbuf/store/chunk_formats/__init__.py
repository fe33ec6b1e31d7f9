"""The layouts: how each stores chunks as objects. Which one a store has stands in its manifest."""

from collections.abc import Mapping, Sequence
from typing import Any

from diskbuf.errors import StoreFormatError
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.layout import ColumnLayout


def chunk_format_of(
    layouts: Sequence[ColumnLayout],
    *,
    layout: str,
    codec: Mapping[str, Any] | None,
    metadata: Mapping[bytes, bytes] | None = None,
) -> ChunkFormat:
    """Returns the chunk format of a store.

    Args:
        layouts: The columns, in spec order.
        layout: "zarr" or "arrow".
        codec: What `codecs.codec_json` made, as it stands in the manifest.
        metadata: What each object is to carry along, where the layout has a place for it (only "arrow" has).

    Raises:
        StoreFormatError: When layout or codec is one that this version doesn't know.
    """
    if layout == "zarr" and codec is None:
        from diskbuf.store.chunk_formats.raw_chunks import RawChunks

        return RawChunks(layouts)
    if layout == "zarr":
        from diskbuf.store.chunk_formats.zarr_shards import ZarrShards

        return ZarrShards(layouts, codec or {})
    if layout == "arrow":
        from diskbuf.store.chunk_formats.arrow_parts import ArrowParts

        return ArrowParts(layouts, codec, metadata or {})
    raise StoreFormatError(f"layout must be 'zarr' or 'arrow', got {layout!r}. Open the store with a newer diskbuf.")
