"""TFRecord files, read and written without TensorFlow: records of bytes, each framed by its length and checksums.

The framing is that of TensorFlow's `tf.io.TFRecordWriter` ("TFRecord and tf.train.Example", tensorflow.org): a
little-endian uint64 length, the masked CRC-32C of those 8 bytes, the record, and the masked CRC-32C of the record.
"""

import os
import struct
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import google_crc32c

from diskbuf.errors import SpecError

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_BUFFER_BYTES = 2**20


def read_records(path: str | os.PathLike[str]) -> Generator[bytes]:
    """Reads a file's records in order, one at a time.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RecordWriter(f"{folder}/words.tfrecord") as writer:
        ...         for word in (b"replay", b"", b"buffer"):
        ...             writer.write(word)
        ...     list(read_records(f"{folder}/words.tfrecord"))
        [b'replay', b'', b'buffer']

    Args:
        path: The file.

    Yields:
        The bytes of each record, which are what was written: their checksum has been compared.

    Raises:
        SpecError: When the file ends inside a record, or a checksum doesn't match; record and file are named.
        OSError: When it can't be read.
    """
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        left = os.fstat(file.fileno()).st_size
        number = 0
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise _cut_short(path, number)
            length, checksum = _HEAD.unpack(head)
            if checksum != masked_checksum(head[:8]):
                raise _damaged(path, number, "length")
            left -= _HEAD.size + length + _FOOT.size
            if left < 0:
                raise _cut_short(path, number)
            body = file.read(length + _FOOT.size)
            if len(body) < length + _FOOT.size:  # it has become shorter since it was opened
                raise _cut_short(path, number)
            record = body[:length]
            if _FOOT.unpack_from(body, length)[0] != masked_checksum(record):
                raise _damaged(path, number, "bytes")
            yield record
            number += 1


def read_blocks(path: str | os.PathLike[str], most_bytes: int) -> Iterator[tuple[int, list[bytes]]]:
    """Reads a file's records, many at a time.

    Args:
        path: The file.
        most_bytes: Size of a block that is large enough; one record it always has.

    Yields:
        (number of the first, records).

    Raises:
        SpecError: As `read_records`.
        OSError: When it can't be read.
    """
    block: list[bytes] = []
    size = first = 0
    for record in read_records(path):
        block.append(record)
        size += len(record) + _HEAD.size + _FOOT.size
        if size >= most_bytes:
            yield first, block
            first += len(block)
            block, size = [], 0
    if block:
        yield first, block


class RecordWriter:
    """Writes records to a new file.

    Args:
        path: The file; one that is there is overwritten.

    Raises:
        OSError: When it can't be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - closed by close()

    def write(self, record: bytes) -> None:
        """Appends a record.

        Raises:
            OSError: When the disk is full.
        """
        head = len(record).to_bytes(8, "little")
        self._file.write(head + _FOOT.pack(masked_checksum(head)))
        self._file.write(record)
        self._file.write(_FOOT.pack(masked_checksum(record)))

    def close(self) -> None:
        """Writes what is left and closes the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def masked_checksum(data: bytes) -> int:
    """Returns the CRC-32C of bytes, rotated and shifted as TFRecord stores it."""
    checksum: int = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _cut_short(path: str | os.PathLike[str], number: int) -> SpecError:
    return SpecError(
        f"record {number} of {Path(path)} must end before the file does; it is cut short. "
        "Copy the file again, or close its writer first."
    )


def _damaged(path: str | os.PathLike[str], number: int, what: str) -> SpecError:
    return SpecError(
        f"record {number} of {Path(path)} must match its checksum; its {what} have changed since they were written, or "
        "the file is no TFRecord. Copy the file again."
    )
