"""Which leaves are pictures, and their frames as pixels. Knows no files."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import MissingExtraError, OptionError, WindowError
from diskbuf.scanning import scan
from diskbuf.specs import ArraySpec, BoundedArraySpec

if TYPE_CHECKING:
    from diskbuf import UniformReplayBuffer

Pixels = NDArray[np.uint8]
Axes = Literal["HW", "HWC", "CHW"]

_CHANNELS = (1, 3, 4)
_BLOCK_BYTES = 2**23
_SMALLEST = 2
"""A side that is shorter is no picture's: [4, 1] is a vector."""


def spec_leaves(buffer: "UniformReplayBuffer") -> dict[str, ArraySpec]:
    """The specs of a buffer's leaves by their paths, in order."""
    from diskbuf.tree import Structure

    structure = Structure(buffer.data_spec)
    return dict(zip(structure.paths, structure.flatten(buffer.data_spec), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureLeaf:
    """A leaf that is a picture each step.

    Attributes:
        path: The leaf.
        spec: Its spec.
        axes: What its axes are: height, width, and channels.
        is_stack: Whether four channels are the latest four grey frames, the newest last, rather than colours with
            opacity. The spec doesn't say which, its values do.
    """

    path: str
    spec: ArraySpec
    axes: Axes
    is_stack: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        shape = self.spec.shape
        return (shape[1], shape[2]) if self.axes == "CHW" else (shape[0], shape[1])

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colours, 4 for colours with opacity or for stacks of grey frames."""
        return {"HW": 1, "HWC": self.spec.shape[-1], "CHW": self.spec.shape[0]}[self.axes]

    def told_by(self, frames: NDArray[Any]) -> "PictureLeaf":
        """Tells by some frames, [T, *shape], whether the leaf holds stacks.

        A fourth channel is opacity when at least half of it is 255: sprites may be see-through here and there, but
        frames of games, which are stacked, are seldom half white.
        """
        if self.channels != 4:
            return self
        fourth = frames[:, 3] if self.axes == "CHW" else frames[..., 3]
        whole = 255 if frames.dtype == np.uint8 else 1
        return dataclasses.replace(self, is_stack=bool(2 * np.count_nonzero(fourth == whole) < fourth.size))

    def pixels(self, frames: NDArray[Any]) -> Pixels:
        """Makes pixels of frames; of a stack the newest one.

        Args:
            frames: [T, *shape] as they were stored.

        Returns:
            [T, H, W, C] with C 1, 3 or 4, not always a copy.
        """
        if frames.dtype != np.uint8:
            frames = np.rint(np.nan_to_num(frames.astype(np.float32)).clip(0, 1) * 255).astype(np.uint8)
        if self.axes == "HW":
            frames = frames[..., None]
        elif self.axes == "CHW":
            frames = np.moveaxis(frames, 1, -1)
        return frames[..., 3:] if self.is_stack else frames

    def opaque(self, frames: NDArray[Any]) -> Pixels:
        """As `pixels`, laid on white where there is opacity: [T, H, W, C] with C 1 or 3."""
        pixels = self.pixels(frames)
        if pixels.shape[-1] != 4:
            return pixels
        color, opacity = pixels[..., :3].astype(np.uint16), pixels[..., 3:].astype(np.uint16)
        return ((color * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def picture_leaf(path: str, spec: ArraySpec) -> PictureLeaf | None:
    """Tells whether a leaf is a picture.

    That is uint8, or floats whose bounds are 0 and 1, of shape [H, W], [H, W, C] or [C, H, W] with C 1, 3 or 4.
    """
    axes = _axes(spec.shape)
    if axes is None or not (spec.dtype == np.uint8 or _is_unit(spec)):
        return None
    return PictureLeaf(path=path, spec=spec, axes=axes)


def _axes(shape: Sequence[int]) -> Axes | None:
    axes: Axes
    if len(shape) == 2:
        axes, sides = "HW", tuple(shape)
    elif len(shape) == 3 and shape[2] in _CHANNELS:
        axes, sides = "HWC", (shape[0], shape[1])
    elif len(shape) == 3 and shape[0] in _CHANNELS:
        axes, sides = "CHW", (shape[1], shape[2])
    else:
        return None
    return axes if min(sides) >= _SMALLEST else None


def _is_unit(spec: ArraySpec) -> bool:
    if spec.dtype.kind != "f" or not isinstance(spec, BoundedArraySpec):
        return False
    return bool(np.all(spec.minimum == 0) and np.all(spec.maximum == 1))


def picture_leaves(leaves: Mapping[str, ArraySpec]) -> list[PictureLeaf]:
    """Those of some leaves that are pictures."""
    return [found for path, spec in leaves.items() if (found := picture_leaf(path, spec)) is not None]


def chosen_picture(leaves: Mapping[str, ArraySpec], path: str | None) -> PictureLeaf:
    """The picture that was asked for, or the only one.

    Args:
        leaves: Specs by path.
        path: The leaf; None for the only one that is a picture.

    Raises:
        OptionError: When there is no such leaf or several, or it is no picture.
    """
    there = picture_leaves(leaves)
    if path is None:
        if len(there) == 1:
            return there[0]
        names = ", ".join(repr(leaf.path) for leaf in there)
        if there:
            raise OptionError(f"--column must say which leaf to draw, got none. Choose one of {names}.")
        raise OptionError(f"the store must have a leaf that is a picture, got none. {_RULE}")
    spec = leaves[path]
    found = picture_leaf(path, spec)
    if found is not None:
        return found
    advice = _RULE
    if spec.dtype.kind == "f" and _axes(spec.shape) is not None:
        advice = "Floats are drawn where the spec bounds them by 0 and 1; store them so, or as uint8."
    raise OptionError(f"leaf {path!r} must be a picture, got {spec.dtype} {list(spec.shape)}. {advice}")


_RULE = "Pictures are uint8, or floats bounded by 0 and 1, of [H, W], [H, W, C] or [C, H, W] with C 1, 3 or 4."


def lane_rows(
    buffer: "UniformReplayBuffer", path: str, *, lane: int, first_id: int, next_id: int
) -> Iterator[NDArray[Any]]:
    """Reads the rows of a leaf in one lane, some MiB at a time.

    Args:
        buffer: A buffer, open for reading.
        path: The leaf.
        lane: The lane.
        first_id: First id.
        next_id: Where to stop, exclusive.

    Yields:
        [T, *shape] each.

    Raises:
        WindowError: When the rows are not in the window, or left it meanwhile.
    """
    leaves = spec_leaves(buffer)
    row_bytes = {leaf: spec.dtype.itemsize * int(np.prod(spec.shape)) for leaf, spec in leaves.items()}
    # A scan reads the leaf in all lanes, and `read` all leaves in the lane. Chunks that are fetched come whole.
    if (
        buffer.batch_size == 1
        or isinstance(buffer.path, str)
        or (buffer.batch_size * row_bytes[path] <= sum(row_bytes.values()))
    ):
        expected = first_id
        for block in scan(buffer, [path], first_id=first_id, next_id=next_id, block_bytes=_BLOCK_BYTES):
            if block.first_id != expected:
                break
            expected = block.next_id
            yield block.columns[path][lane]
        if expected < next_id:
            raise WindowError(
                f"ids must be in the window [{buffer.first_id}, {buffer.next_id}), got {first_id} to {next_id - 1}. "
                "Choose newer ones."
            )
        return
    from diskbuf.tree import Structure

    structure = Structure(buffer.data_spec)
    number = structure.paths.index(path)
    most = max(1, _BLOCK_BYTES // max(1, sum(row_bytes.values())))
    for begin in range(first_id, next_id, most):
        rows = buffer.read(np.arange(begin, min(next_id, begin + most)), lane)
        yield structure.flatten(rows)[number]


def episode_pixels(
    buffer: "UniformReplayBuffer", leaf: PictureLeaf, episode: "Span", *, boundaries: tuple[str, str] | None
) -> Iterator[Pixels]:
    """Reads the pictures of an episode, some MiB at a time, with that of its final observation where there is one.

    Args:
        buffer: A buffer, open for reading.
        leaf: The leaf.
        episode: The episode.
        boundaries: Paths of `step_type` and `next_step_type`, where episodes have boundary rows; else None.

    Yields:
        [T, H, W, C] each, C 1 or 3.

    Raises:
        WindowError: When the episode has left the window.
    """
    next_id = episode.last_id + 1
    if boundaries is not None and boundary_follows(buffer, boundaries, lane=episode.lane, last_id=episode.last_id):
        next_id += 1
    told = leaf
    rows = lane_rows(buffer, leaf.path, lane=episode.lane, first_id=episode.first_id, next_id=next_id)
    for number, frames in enumerate(rows):
        if not number:
            told = leaf.told_by(frames)
        yield told.opaque(frames)


class Span(Protocol):
    """Consecutive steps of a lane."""

    @property
    def lane(self) -> int:
        """The lane."""

    @property
    def first_id(self) -> int:
        """Id of the first."""

    @property
    def last_id(self) -> int:
        """Id of the last."""


def require(module: str, *, verb: str, extra: str) -> None:
    """Looks whether a package is there.

    Raises:
        MissingExtraError: When it isn't; names the extra that brings it.
    """
    import importlib.util

    if importlib.util.find_spec(module) is None:
        name = {"PIL": "pillow", "imageio_ffmpeg": "imageio-ffmpeg"}.get(module, module)
        raise MissingExtraError(
            f"diskbuf {verb} needs {name}, which isn't installed. Install it with: pip install 'diskbuf[{extra}]'."
        )


def boundary_follows(buffer: "UniformReplayBuffer", step_types: tuple[str, str], *, lane: int, last_id: int) -> bool:
    """Whether the row after a step is the boundary that holds its episode's final observation.

    Args:
        buffer: A buffer, open for reading.
        step_types: Paths of `step_type` and `next_step_type`.
        lane: The lane.
        last_id: Id of the step.
    """
    from diskbuf.trajectories import StepType

    for block in scan(buffer, step_types, first_id=last_id, next_id=last_id + 2):
        if block.first_id == last_id and block.next_id == last_id + 2:
            said, found = block.columns[step_types[1]][lane, 0], block.columns[step_types[0]][lane, 1]
            return bool(said == StepType.LAST and found == StepType.LAST)
    return False
