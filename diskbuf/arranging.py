"""What merging and splitting share: windows of snapshots, and segments put together to what becomes a store."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diskbuf.errors import OptionError
from diskbuf.replay_buffers.opening import item_format_of, leaves_of
from diskbuf.store.arranged import ArrangedSnapshot, Segment, arranged_manifest
from diskbuf.store.reading import column_layouts
from diskbuf.store.snapshot import Snapshot


def window_of(snapshot: Snapshot, *, history: bool) -> tuple[int, int]:
    """Ids [first, next) of a snapshot's window, or of what is on disk."""
    manifest = snapshot.manifest
    return min(snapshot.oldest_id if history else manifest.first_id, manifest.next_id), manifest.next_id


def arrange(segments: Sequence[Segment], *, first_id: int, lanes: int, metadata: Any) -> ArrangedSnapshot:
    """Puts segments together.

    Raises:
        OptionError: When metadata isn't a JSON value.
    """
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(f"metadata must be a JSON value, got {metadata!r:.80}: {error}.") from error
    manifest = arranged_manifest(segments, first_id=first_id, lanes=lanes, metadata=metadata)
    layouts = column_layouts(leaves_of(item_format_of(manifest)), manifest, path=Path())
    return ArrangedSnapshot(manifest, layouts, [segment for segment in segments if segment.steps] or segments[:1])


def named(what: str, places: Sequence[Path | str], segments: Sequence[Segment]) -> str:
    """The same words for the same rows of the same stores."""
    text = json.dumps(
        [
            [segment.snapshot.manifest.created, segment.first_id, segment.next_id, segment.lane, segment.is_cut]
            for segment in segments
        ]
    )
    return f"{what} of {', '.join(map(str, places))} [{hashlib.sha256(text.encode()).hexdigest()}]"
