"""Writing frames as a GIF or an MP4, a frame at a time."""

import abc
import contextlib
import io
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import DiskbufError, OptionError
from diskbuf_tools.output import Progress

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Pixels = NDArray[np.uint8]

LARGEST_SIDE = {".gif": 2**16 - 1, ".mp4": 2**13}
MOST_FPS = {".gif": 50.0, ".mp4": 240.0}
_GIF_TICK = 0.01  # GIF's unit of time, in seconds


class VideoError(DiskbufError, OSError):
    """The encoder failed; the message has its last words."""


def check(suffix: str, size: tuple[int, int], *, fps: float, scale: int) -> None:
    """Looks whether frames can be written so.

    Args:
        suffix: ".gif" or ".mp4".
        size: (height, width) of a frame.
        fps: Frames a second.
        scale: How many times as high and wide they become.

    Raises:
        OptionError: When they can't.
    """
    if not 0 < fps <= MOST_FPS[suffix]:
        advice = "Players slow shorter frames down; write .mp4 for more." if suffix == ".gif" else "Choose fewer."
        raise OptionError(f"--fps must be above 0 and at most {MOST_FPS[suffix]:g} for {suffix}, got {fps:g}. {advice}")
    largest = LARGEST_SIDE[suffix]
    if scale < 1 or max(size) * scale > largest:
        raise OptionError(
            f"--scale must be from 1 to {max(1, largest // max(size))} for frames of {size[0]}x{size[1]}, got {scale}."
        )


def write(blocks: Iterable[Pixels], file: Path, suffix: str, *, fps: float, scale: int) -> int:
    """Writes frames, holding one block of them.

    GIF keeps the colours of frames that have up to 256; of others it takes the 256 that fit best. MP4 is H.264 at a
    quality that the eye takes for the original; odd sides are padded by a black line.

    Args:
        blocks: [T, H, W, C] each, C 1 or 3, all of one H, W and C.
        file: Where to.
        suffix: ".gif" or ".mp4".
        fps: Frames a second.
        scale: How many times as high and wide they become: each pixel that many pixels.

    Returns:
        How many frames there were.

    Raises:
        VideoError: When ffmpeg fails.
        OptionError: When there are no frames.
    """
    count = 0
    writer: _Writer | None = None
    with contextlib.ExitStack() as stack:
        for block in blocks:
            for frame in block:
                if writer is None:
                    made = _GifWriter if suffix == ".gif" else _Mp4Writer
                    writer = stack.enter_context(made(file, frame.shape, fps=fps, scale=scale))
                writer.add(np.ascontiguousarray(frame))
                count += 1
        if writer is None:
            raise OptionError("a video must have at least one frame, got none. Choose another episode.")
        writer.finish()
    return count


class _Writer(abc.ABC):
    @abc.abstractmethod
    def add(self, frame: Pixels) -> None:
        """Takes the next frame, [H, W, C]."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Writes what is left."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- GIF (CompuServe, Graphics Interchange Format, Version 89a, 1990)


class _GifWriter(_Writer):
    """Pillow encodes each picture. What is around them is written here, as Pillow's own writer keeps all in memory."""

    def __init__(self, file: Path, shape: tuple[int, ...], *, fps: float, scale: int) -> None:
        self._out: IO[bytes] = file.open("wb")
        self._scale = scale
        self._fps = fps
        self._frames = 0
        self._before: Pixels | None = None
        height, width = shape[0] * scale, shape[1] * scale
        self._out.write(b"GIF89a" + struct.pack("<HHBBB", width, height, 0x70, 0, 0))
        self._out.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # for ever

    def add(self, frame: Pixels) -> None:
        # Ticks are rounded where frames begin, so that 30 frames make a second though none is a third of 0.1 s.
        ticks = [round((self._frames + more) / self._fps / _GIF_TICK) for more in (0, 1)]
        self._frames += 1
        top, bottom, left, right = self._changed(frame)
        self._before = frame
        part = frame[top:bottom, left:right]
        part = part.repeat(self._scale, axis=0).repeat(self._scale, axis=1)
        table, data = _gif_picture(part)
        self._out.write(b"\x21\xf9\x04" + struct.pack("<BHBB", 1 << 2, max(1, ticks[1] - ticks[0]), 0, 0))
        corner = left * self._scale, top * self._scale
        bits = (len(table) // 3).bit_length() - 1
        self._out.write(b"\x2c" + struct.pack("<HHHHB", *corner, part.shape[1], part.shape[0], 0x80 | (bits - 1)))
        self._out.write(table)
        self._out.write(data)

    def _changed(self, frame: Pixels) -> tuple[int, int, int, int]:
        """The part that differs from the frame before; a pixel where none does."""
        if self._before is None:
            return 0, frame.shape[0], 0, frame.shape[1]
        differs = (frame != self._before).any(axis=2)
        rows, columns = differs.any(axis=1).nonzero()[0], differs.any(axis=0).nonzero()[0]
        if not len(rows):
            return 0, 1, 0, 1
        return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1

    def finish(self) -> None:
        self._out.write(b"\x3b")

    def close(self) -> None:
        self._out.close()


def _gif_picture(frame: Pixels) -> tuple[bytes, bytes]:
    """Returns the colour table of a picture and its packed pixels, as GIF has them."""
    buffer = io.BytesIO()
    _paletted(frame).save(buffer, "GIF", optimize=False, interlace=0)
    data = buffer.getvalue()
    flags = data[10]
    size = 3 << ((flags & 7) + 1) if flags & 0x80 else 0
    table, at = data[13 : 13 + size], 13 + size
    while data[at] == 0x21:  # extensions: a label, and blocks up to an empty one
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    local = data[at + 9]
    at += 10
    if local & 0x80:
        size = 3 << ((local & 7) + 1)
        table, at = data[at : at + size], at + size
    return table, data[at : data.rindex(b"\x3b")]


def _paletted(frame: Pixels) -> "PillowImage":
    from PIL import Image

    if frame.shape[2] == 1:
        return Image.fromarray(frame[..., 0])
    packed = frame[..., 0].astype(np.uint32) << 16 | frame[..., 1].astype(np.uint32) << 8 | frame[..., 2]
    colors, places = np.unique(packed, return_inverse=True)
    if len(colors) > 256:
        return Image.fromarray(frame).quantize(256, method=Image.Quantize.MEDIANCUT)
    found = Image.fromarray(places.reshape(packed.shape).astype(np.uint8)).convert("L")
    found.putpalette(np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=1).astype(np.uint8).tobytes())
    return found


# ---- MP4


class _Mp4Writer(_Writer):
    def __init__(self, file: Path, shape: tuple[int, ...], *, fps: float, scale: int) -> None:
        import imageio_ffmpeg

        height, width, channels = shape
        # H.264 with half the colours needs even sides. HD's matrix is what players take where nothing says otherwise.
        steps = [
            f"scale=iw*{scale}:ih*{scale}:flags=neighbor",
            "pad=ceil(iw/2)*2:ceil(ih/2)*2",
            "scale=out_color_matrix=bt709:out_range=tv",
            "format=yuv420p",
        ]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # `close` does
        self._process = subprocess.Popen(
            [
                imageio_ffmpeg.get_ffmpeg_exe(),
                *("-hide_banner", "-loglevel", "error", "-y"),
                *("-f", "rawvideo", "-pix_fmt", "gray" if channels == 1 else "rgb24", "-s", f"{width}x{height}"),
                *("-r", f"{fps:g}", "-i", "pipe:0", "-an", "-vf", ",".join(steps)),
                *("-c:v", "libx264", "-crf", "18", "-preset", "medium"),
                *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"),
                *("-movflags", "+faststart", "-f", "mp4", str(file)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
        )

    def add(self, frame: Pixels) -> None:
        try:
            self._stdin.write(frame.data)
        except BrokenPipeError as error:
            raise self._failed() from error

    @property
    def _stdin(self) -> IO[bytes]:
        if self._process.stdin is None:
            raise VideoError("ffmpeg takes no frames.")
        return self._process.stdin

    def finish(self) -> None:
        try:
            self._stdin.close()
        except BrokenPipeError as error:
            raise self._failed() from error
        if self._process.wait():
            raise self._failed()

    def _failed(self) -> VideoError:
        self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        return VideoError(f"ffmpeg must write the video, but failed: {words[-1] if words else 'it said nothing'}.")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._words.close()


def counted(blocks: Iterable[Pixels], tell: Progress, total: int) -> Iterator[Pixels]:
    """Tells of the frames that pass."""
    done = 0
    for block in blocks:
        yield block
        done += len(block)
        tell(done, total)
