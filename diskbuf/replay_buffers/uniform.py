"""The uniform replay buffer: TF-Agents' replay-buffer API over a store on disk."""

import contextlib
import copy
import functools
import itertools
import os
import secrets
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diskbuf import plan, specs
from diskbuf.errors import ClosedError, OptionError, ReadOnlyError, WindowError
from diskbuf.options import ReadOptions, StoreOptions
from diskbuf.readers.elements import Elements
from diskbuf.readers.requests import count, seed_of, share_of
from diskbuf.readers.resident_rows import ResidentSampler
from diskbuf.readers.rows import PassReader, Sampler, Source, longest_run
from diskbuf.replay_buffers.items import ItemFormat
from diskbuf.replay_buffers.opening import (
    StoreRequest,
    local_path,
    open_existing,
    open_for_writing,
    open_remote,
    place_of,
)
from diskbuf.store.chunk_formats.codecs import codec_name
from diskbuf.store.publishing import PublishOptions
from diskbuf.store.reading import Store
from diskbuf.store.remote import RemoteStore
from diskbuf.store.writing import WritableStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import tensorflow as tf

    from diskbuf.episode_index import EpisodeIndex

_KIND = "uniform"

Shuffle = Literal["exact", "resident"]


class BufferInfo(NamedTuple):
    """What `get_next` says of a sample.

    Attributes:
        ids: int64 step ids, of the shape of the sample without the columns' own axes.
        probabilities: float32 probability of each sequence, [] or [sample_batch_size].
    """

    ids: Any
    probabilities: Any


class UniformReplayBuffer:
    """A replay buffer on disk: steps of `batch_size` lanes are appended, sequences are sampled uniformly.

    It survives restarts and kill -9: every step whose `add_batch` returned is there at the next opening. The window
    holds the newest `max_length` steps of each lane. Everything takes and returns numpy; tensors are accepted as input.
    Samples are copies. One thread adds at a time, any number sample meanwhile; other processes read with
    `diskbuf.open`.

        >>> import numpy as np
        >>> spec = {"observation": specs.ArraySpec([3], "float32"), "reward": specs.ArraySpec([], "float32")}
        >>> with UniformReplayBuffer(spec, batch_size=2, max_length=100, seed=7) as buffer:
        ...     for t in range(5):
        ...         buffer.add_batch({"observation": np.full([2, 3], t, "f4"), "reward": np.full([2], t, "f4")})
        ...     items, info = buffer.get_next(sample_batch_size=4, num_steps=2)
        >>> items["observation"].shape, bool((items["reward"] == info.ids).all())
        ((4, 2, 3), True)

    Args:
        data_spec: Nest of ArraySpec for one step of one lane; also TensorFlow's or TF-Agents' specs and Gymnasium
            spaces.
        batch_size: Number of lanes B, at least 1.
        max_length: Most steps of a lane in the window; None keeps everything in it.
        path: The store's folder; None makes a private temporary store that is removed at close.
        mode: "a" creates a store or continues the one that is there, "w-" only creates.
        keep_history: Whether steps that leave the window stay on disk, for `diskbuf.open(path, history=True)`.
        metadata: Any JSON value to keep with the store; None keeps what is there.
        seed: Makes samples repeatable; None draws a seed.
        dataset_drop_remainder: Whether a deterministic pass leaves out the batches and windows that come out short.
        dataset_window_shift: Steps between the starts of a deterministic pass's windows; None is `num_steps`.
        options: How the store is laid out and synced.
        read_options: How chunks are read that are compressed, or no longer here.
        trim: Whether a `max_length` smaller than the store's may let the oldest steps go.
        publish_to: URL to publish the store to as it grows, such as ``s3://bucket/runs/cartpole.zarr``. Others read it
            there with `diskbuf.open`; what they see is always a whole commit. `close` publishes the last steps.
        publish_seconds: Seconds, above 0, between two publications; each object is put at most once in them.
        keep_local: Whether chunks that are full and published stay here as well. Fixed when the store is created. If
            not, they are fetched from the URL when they are read.
        storage_options: What fsspec's file system of the URL's protocol takes: keys, endpoints.

    Raises:
        SpecError: When data_spec is not a nest of specs.
        OptionError: When an argument is outside its rule.
        StoreExistsError: When the path is taken by something else, or mode is "w-"; when `publish_to` holds something
            else than what was published of this store.
        StoreNotFoundError: When there is no bucket or container for `publish_to`.
        StoreAccessError: When `publish_to` refuses the credentials. One that doesn't answer is a warning.
        MissingExtraError: When the package for the protocol of `publish_to` isn't installed.
        StoreLockedError: When another process writes the store.
        StoreLockUnsupportedError: When its file system doesn't lock files; `StoreOptions(lock=False)` is the way round.
        StoreMismatchError: When the store was made with another spec, lanes or kind, or a larger max_length.
        StoreFormatError: When a newer version wrote the store.
        StoreCorruptError: When one of its files is missing, short or unreadable.
        OSError: When a file can't be made.
    """

    def __init__(
        self,
        data_spec: Any,
        batch_size: int = 1,
        max_length: int | None = 1000,
        *,
        path: str | os.PathLike[str] | None = None,
        mode: Literal["a", "w-"] = "a",
        keep_history: bool = False,
        metadata: Any = None,
        seed: int | None = None,
        dataset_drop_remainder: bool = False,
        dataset_window_shift: int | None = None,
        options: StoreOptions | None = None,
        read_options: ReadOptions | None = None,
        trim: bool = False,
        publish_to: str | None = None,
        publish_seconds: float = 60.0,
        keep_local: bool = True,
        storage_options: "Mapping[str, Any] | None" = None,
    ) -> None:
        if mode not in ("a", "w-"):
            raise OptionError(
                f"mode must be 'a' (create or continue) or 'w-' (only create), got {mode!r}. To read, use diskbuf.open."
            )
        if publish_to is not None and path is None:
            raise OptionError(
                f"path must be given with publish_to, got None and {publish_to!r}: a temporary store goes with its "
                "buffer, and nobody could publish more of it. Name a folder."
            )
        request = StoreRequest(
            kind=_KIND,
            format=ItemFormat(specs.as_spec(data_spec), count("batch_size", batch_size)),
            max_length=None if max_length is None else count("max_length", max_length),
            keep_history=flag("keep_history", keep_history),
            metadata=metadata,
            options=_options(options),
            is_private=path is None,
            read_options=_read_options(read_options),
            publish=PublishOptions(
                url=publish_to, seconds=publish_seconds, keep_local=keep_local, storage_options=storage_options
            ),
        )
        self._set_reading(
            seed, dataset_drop_remainder=dataset_drop_remainder, dataset_window_shift=dataset_window_shift
        )
        folder = Path(tempfile.mkdtemp(prefix="diskbuf-")) if path is None else local_path(path)
        self._reopen: Callable[[Path | str], UniformReplayBuffer] | None = None
        self._remove: Callable[[], object] = (
            weakref.finalize(self, _remove_private, folder, os.getpid()) if path is None else _nothing
        )
        try:
            store = open_for_writing(folder, request, mode=mode, trim=flag("trim", trim))
        except BaseException:
            self._remove()
            raise
        self._set_store(store, request.format)

    def _set_reading(self, seed: int | None, *, dataset_drop_remainder: bool, dataset_window_shift: int | None) -> None:
        given = seed_of(seed)
        self._seed = secrets.randbits(63) if given is None else given
        self._has_own_seed = given is not None
        self._streams = itertools.count()
        self._drop_remainder = flag("dataset_drop_remainder", dataset_drop_remainder)
        self._window_shift = (
            None if dataset_window_shift is None else count("dataset_window_shift", dataset_window_shift)
        )

    def _set_store(self, store: Store, item_format: ItemFormat) -> None:
        self._held = _HeldStore(store)
        self._writer = store if isinstance(store, WritableStore) else None
        _open_buffers.add(self)
        self._format = item_format
        self._episode_indices: dict[str | None, EpisodeIndex] = {}
        self._sampler = self._new_sampler(self._own_source())
        self._path = store.path
        self._length = store.manifest.max_length
        self._metadata = store.manifest.metadata

    @property
    def _store(self) -> Store | None:
        return self._held.store

    def _own_source(self, within_episodes: bool | str = False) -> Source:
        """The rows for the buffer itself, which is not kept alive by it: one that nobody holds closes at once."""
        return Source(opened=self._held.opened, episodes=self._episode_index(within_episodes))

    def _readers_source(self, within_episodes: bool | str) -> Source:
        """The rows for a reader that keeps the buffer open."""
        return Source(opened=self._opened, episodes=self._episode_index(within_episodes))

    def _new_sampler(self, source: Source, *, seed: int | None = None, share: plan.Share | None = None) -> Sampler:
        """A sampler with a seed of its own for each reader, so that one doesn't change what another draws."""
        own_seed = plan.derive_seed(self._seed, next(self._streams)) if seed is None else seed
        return Sampler(source, plan.RandomPlanner(own_seed, lanes=self.batch_size, share=share or plan.Share()))

    def draw_anew(self) -> None:
        """Draws another seed, unless one was given: for a forked child, which would sample what its parent does."""
        if not self._has_own_seed:
            self._seed = secrets.randbits(63)
            self._sampler = self._new_sampler(self._own_source())

    # ---- what it is

    @property
    def data_spec(self) -> Any:
        """Nest of ArraySpec for one step of one lane."""
        return self._format.data_spec

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self._format.batch_size

    @property
    def max_length(self) -> int | None:
        """Most steps of a lane in the window, None for no limit."""
        return self._length

    @property
    def capacity(self) -> int | None:
        """Most steps of all lanes in the window, None for no limit."""
        return None if self._length is None else self._length * self.batch_size

    @property
    def path(self) -> Path | str:
        """The store's folder, or its URL."""
        return self._path

    @property
    def metadata(self) -> Any:
        """The JSON value kept with the store, a copy."""
        return copy.deepcopy(self._metadata)

    @property
    def first_id(self) -> int:
        """Id of the oldest step in the window; equal to `next_id` when it is empty."""
        return self._opened().window()[0]

    @property
    def next_id(self) -> int:
        """Id that the next step will get."""
        return self._opened().window()[1]

    @property
    def layout(self) -> str:
        """How chunks that are full are stored, "zarr" or "arrow"."""
        return self._opened().manifest.layout

    @property
    def codec(self) -> str | None:
        """How they are compressed, by name; None for not at all."""
        codec = self._opened().manifest.codec
        return None if codec is None else codec_name(codec)

    def num_frames(self) -> int:
        """Returns how many steps of all lanes are in the window."""
        first_id, next_id = self._opened().window()
        return (next_id - first_id) * self.batch_size

    def __reduce__(self) -> tuple["Callable[[Path | str], UniformReplayBuffer]", tuple[Path | str]]:
        """Lets a buffer that only reads be sent to another process: its path and options go, and it is opened there.

        Raises:
            TypeError: When the buffer can be written to.
            ClosedError: After `close`.
        """
        self._opened()
        if self._reopen is None:
            raise TypeError(
                f"a buffer must be open for reading only to be pickled, got {self!r}. "
                f"Open it by its path in the other process: diskbuf.open({str(self._path)!r})."
            )
        return self._reopen, (self._path,)

    def __repr__(self) -> str:
        state = "closed" if self._store is None else "writable" if self._writer is not None else "read-only"
        return f"<UniformReplayBuffer {self._path} ({state}), batch_size={self.batch_size}, max_length={self._length}>"

    # ---- adding

    def add_batch(self, items: Any) -> None:
        """Adds one step of every lane. When this returns, the step survives the process.

        Args:
            items: Nest like `data_spec` with leaves [B, *shape] of the spec's dtypes, arrays or tensors; copied.

        Raises:
            SpecError: When structure, dtype, rank, lanes or shape don't fit; nothing was added.
            ReadOnlyError: When the buffer was opened for reading, or in another process.
            ClosedError: After `close`.
            OSError: When the disk is full; nothing was added, and adding goes on when there is room.
        """
        writer = self._writer
        if writer is None:
            raise self._not_writable()
        try:
            if writer.append(self._format.flatten_up_to(items)):
                return
        except (ValueError, TypeError, AttributeError):
            pass  # not of the exact structure, or no arrays: the careful way converts or explains
        writer.append(self._format.rows(items))

    def extend(self, items: Any) -> None:
        """Adds T steps of every lane, as T calls of `add_batch` would.

        Args:
            items: Nest like `data_spec` with leaves [B, T, *shape]; copied.

        Raises:
            SpecError: As `add_batch`, or when leaves differ in T; nothing was added.
            ReadOnlyError: When the buffer was opened for reading, or in another process.
            ClosedError: After `close`.
            OSError: When the disk is full; nothing was added. When a sync fails under a full ring, the first of the
                steps may be there, whole.
        """
        writer = self._writer
        if writer is None:
            raise self._not_writable()
        leaves, steps = self._format.sequences(items)
        writer.extend(leaves, steps)

    def clear(self) -> None:
        """Empties the window. Ids go on counting; a store that keeps history keeps the rows.

        Raises:
            ReadOnlyError: When the buffer was opened for reading.
            ClosedError: After `close`.
        """
        writer = self._writer
        if writer is None:
            raise self._not_writable()
        writer.clear()

    # ---- reading

    def get_next(
        self,
        sample_batch_size: int | None = None,
        num_steps: int | None = None,
        time_stacked: bool = True,
        *,
        within_episodes: bool | str = False,
    ) -> tuple[Any, BufferInfo]:
        """Samples steps or sequences, uniform over all lanes and all ids at which a sequence may start.

        A sequence is consecutive ids of one lane, and never spans a restart of the writer.

        Args:
            sample_batch_size: Sequences S to a sample; None for one without a batch axis.
            num_steps: Steps T of a sequence; None for single steps without a time axis.
            time_stacked: Whether a sequence is one array with a time axis, or a tuple of T items.
            within_episodes: Whether sequences stay inside one episode: True where the spec has a step_type, or the
                path of a boolean leaf that is true in the last step of an episode.

        Returns:
            (items, info): items like `data_spec` with leaves [*shape], [S, *shape], [T, *shape] or [S, T, *shape],
            freshly allocated, or a tuple of T of the first two; info.ids of the same leading shape or a tuple,
            info.probabilities [] or [S].

        Raises:
            EmptyBufferError: When the window is empty.
            WindowError: When no run, or no episode, has num_steps steps in the window.
            OptionError: When an argument is outside its rule.
            SpecError: When nothing in the spec tells where episodes end.
            ClosedError: After `close`.
        """
        size, steps = _size_and_steps(sample_batch_size, num_steps)
        sampler = self._sampler
        if within_episodes is not False:
            sampler = Sampler(self._own_source(within_episodes), sampler.planner)
        batch = sampler.planner.next_batch()
        leaves, ids, probabilities = sampler.sample(batch, count=size or 1, num_steps=steps)
        if size is None:
            leaves = [leaf.reshape(leaf.shape[1:]) for leaf in leaves]
            ids, probabilities = ids.reshape(ids.shape[1:]), probabilities.reshape(())
        if steps is None or time_stacked:
            return self._format.structure.unflatten(leaves), BufferInfo(ids, probabilities)
        axis = 0 if size is None else 1
        items = tuple(
            self._format.structure.unflatten(
                [leaf.take(step, axis).reshape(_without(leaf.shape, axis)) for leaf in leaves]
            )
            for step in range(steps)
        )
        return items, BufferInfo(tuple(ids.take(step, axis) for step in range(steps)), probabilities)

    def gather_all(self) -> Any:
        """Returns everything in the window, oldest first.

        Returns:
            Nest like `data_spec` with leaves [B, T, *shape], T the steps in the window (0 when it is empty), freshly
            allocated. Steps that a writer evicts while they are read are left out.

        Raises:
            ClosedError: After `close`.
        """
        store = self._opened()
        while (leaves := store.read_range(*store.window())) is None:
            pass  # the writer lapped the reading: read again
        return self._format.structure.unflatten(leaves)

    def read(self, ids: ArrayLike, lanes: ArrayLike) -> Any:
        """Returns chosen steps.

        Args:
            ids: [*K] int step ids inside the window, in any order, repeats allowed.
            lanes: [*K] lanes from 0 to B - 1, broadcast against ids.

        Returns:
            Nest like `data_spec` with leaves [*K, *shape], freshly allocated.

        Raises:
            WindowError: When an id is not in the window or a lane not one of the buffer's.
            OptionError: When ids or lanes are not ints, or their shapes don't fit each other.
            ClosedError: After `close`.
        """
        store = self._opened()
        chosen, of_lane = _broadcast(_ints("ids", ids), _ints("lanes", lanes))
        if of_lane.size and not (of_lane.min() >= 0 and of_lane.max() < self.batch_size):
            raise WindowError(f"lanes must be from 0 to {self.batch_size - 1}, got {of_lane.min()} to {of_lane.max()}.")
        while True:
            first_id, next_id = store.window()
            if chosen.size and not (chosen.min() >= first_id and chosen.max() < next_id):
                raise WindowError(
                    f"ids must be in the window [{first_id}, {next_id}), got {chosen.min()} to {chosen.max()}. "
                    "Take them from first_id and next_id."
                )
            leaves = store.gather(first_id, (chosen - first_id) * self.batch_size + of_lane)
            if leaves is not None:
                return self._format.structure.unflatten(leaves)

    def as_dataset(
        self,
        sample_batch_size: int | None = None,
        num_steps: int | None = None,
        num_parallel_calls: int | None = None,
        sequence_preprocess_fn: "Callable[[Any], Any] | None" = None,
        single_deterministic_pass: bool = False,
        *,
        seed: int | None = None,
        start: int = 0,
        shard: "tuple[int, int] | tf.distribute.InputContext | None" = None,
        within_episodes: bool | str = False,
        read_ahead: int | None = None,
        shuffle: Shuffle = "exact",
    ) -> "tf.data.Dataset":
        """Returns a `tf.data.Dataset` of (items, BufferInfo), structured like `data_spec`.

        Without `single_deterministic_pass` it samples for ever as `get_next` does. With it, every step is visited
        once: groups of `sample_batch_size` lanes one after the other, time going forward, in windows of `num_steps`
        that start every `dataset_window_shift` steps and stay inside one run of the writer. The window of ids is taken
        when an iterator gives its first element. The last windows and the last group are shorter, unless the buffer
        was made with `dataset_drop_remainder`.

        Element k of a seed depends on the seed, k and the window alone, so `start=k` goes on where another process
        stopped; `tf.train.Checkpoint(iterator=iter(dataset))` does so too.

        TensorFlow gathers the rows itself where the store's files can be mapped, else NumPy does; which rows they are
        is the same. A dataset outlives a `close` of its buffer only to say that it was closed.

        Args:
            sample_batch_size: Sequences to an element, in a pass lanes to an element; None for no batch axis.
            num_steps: Steps of a sequence; None for single steps without a time axis.
            num_parallel_calls: Elements to read in parallel; None for one at a time.
            sequence_preprocess_fn: Applied to the items of each sequence before they are batched; must keep their
                structure, dtypes and rank. Not with `single_deterministic_pass`, as in TF-Agents.
            single_deterministic_pass: Whether to visit every step once, in order.
            seed: Makes the elements repeatable, in any process; None draws one from the buffer's.
            start: Elements to leave out, of those that this reader would read.
            shard: (index, count) or an InputContext: of every `count` elements, read the one at `index`.
            within_episodes: Whether sequences stay inside one episode: True where the spec has a step_type, or the
                path of a boolean leaf that is true in the last step of an episode.
            read_ahead: Elements to draw from one window. None is 1 for a buffer that can be added to, so that each
                element is drawn from the window of its moment, and up to 16 for one that is only read. A pass reads
                ahead in any case.
            shuffle: "exact" draws from all sequences of the window alike. "resident" is for stores that are larger
                than their cache: it draws from a set of blocks that are at hand, through which all of the window moves
                once an epoch, and never from a sequence that spans two blocks. The README says what each costs.

        Returns:
            The dataset. A failure while it is read (an empty buffer) is a `tf.errors.OpError` with the message.

        Raises:
            SpecError: When data_spec contains lists, which TensorFlow takes for tensors, sequence_preprocess_fn
                returns another structure, or nothing in the spec tells where episodes end.
            WindowError: When num_steps can't be had.
            OptionError: When an argument is outside its rule, or all data would be dropped.
            NotImplementedError: For sequence_preprocess_fn with a deterministic pass.
            ClosedError: After `close`.
        """
        from diskbuf.readers import tf_data  # the readers of TensorFlow only load with this call

        size, steps = _size_and_steps(sample_batch_size, num_steps)
        elements = Elements(data_spec=self.data_spec, batch_size=size, num_steps=steps, info=BufferInfo)
        if num_parallel_calls is not None and num_parallel_calls != -1:  # -1 is tf.data.AUTOTUNE
            count("num_parallel_calls", num_parallel_calls)
        ahead = None if read_ahead is None else count("read_ahead", read_ahead)
        if flag("single_deterministic_pass", single_deterministic_pass):
            _check_pass_is_in_order(shuffle)
            if sequence_preprocess_fn is not None:
                raise NotImplementedError(
                    "sequence_preprocess_fn is not supported with single_deterministic_pass. Use Dataset.map."
                )
            reader = self._pass_reader(size, steps, share_of(start, shard), seed=seed, within_episodes=within_episodes)
            return tf_data.pass_dataset(elements, reader, is_exact=self._drop_remainder)
        sampler = self._random_reader(
            steps, share_of(start, shard), seed=seed, within_episodes=within_episodes, shuffle=shuffle
        )
        if ahead is None:
            ahead = 1 if self._writer is not None else tf_data.usual_read_ahead(elements)
        return tf_data.random_dataset(
            elements,
            sampler,
            read_ahead=ahead,
            num_parallel_calls=num_parallel_calls,
            sequence_preprocess_fn=sequence_preprocess_fn,
            executor="host" if shuffle == "resident" else None,
        )

    def as_numpy_iterator(
        self,
        sample_batch_size: int | None = None,
        num_steps: int | None = None,
        single_deterministic_pass: bool = False,
        *,
        seed: int | None = None,
        start: int = 0,
        shard: "tuple[int, int] | tf.distribute.InputContext | None" = None,
        within_episodes: bool | str = False,
        shuffle: Shuffle = "exact",
    ) -> Iterator[tuple[Any, BufferInfo]]:
        """Returns the elements of `as_dataset` as NumPy arrays, read by NumPy; TensorFlow isn't needed.

            >>> spec = {"reward": specs.ArraySpec([], "float32")}
            >>> with UniformReplayBuffer(spec, batch_size=2, seed=7) as buffer:
            ...     for t in range(5):
            ...         buffer.add_batch({"reward": np.full([2], t, "f4")})
            ...     steps = [items["reward"].tolist() for items, _ in buffer.as_numpy_iterator(2, 2, True)]
            >>> steps
            [[[0.0, 1.0], [0.0, 1.0]], [[2.0, 3.0], [2.0, 3.0]], [[4.0], [4.0]]]

        Args:
            sample_batch_size: As in `as_dataset`.
            num_steps: As in `as_dataset`.
            single_deterministic_pass: As in `as_dataset`.
            seed: As in `as_dataset`; the same seed means the same elements.
            start: As in `as_dataset`.
            shard: As in `as_dataset`.
            within_episodes: As in `as_dataset`.
            shuffle: As in `as_dataset`.

        Returns:
            An iterator over (items, info), each freshly allocated; endless unless it makes a pass. What goes wrong
            while it is read (an empty buffer, a closed one) is raised as our own error.

        Raises:
            SpecError: When nothing in the spec tells where episodes end.
            WindowError: When num_steps can't be had.
            OptionError: When an argument is outside its rule, or all data would be dropped.
            ClosedError: After `close`.
        """
        size, steps = _size_and_steps(sample_batch_size, num_steps)
        share = share_of(start, shard)
        if flag("single_deterministic_pass", single_deterministic_pass):
            _check_pass_is_in_order(shuffle)
            return self._pass(self._pass_reader(size, steps, share, seed=seed, within_episodes=within_episodes))
        sampler = self._random_reader(steps, share, seed=seed, within_episodes=within_episodes, shuffle=shuffle)
        return self._samples(sampler, size, steps)

    def _samples(self, sampler: Sampler, size: int | None, steps: int | None) -> Iterator[tuple[Any, BufferInfo]]:
        def read(batch: int) -> tuple[Any, BufferInfo]:
            leaves, ids, probabilities = sampler.sample(batch, count=size or 1, num_steps=steps)
            if size is None:
                leaves = [leaf[0] for leaf in leaves]
                ids, probabilities = ids[0], probabilities[0]
            return self._format.structure.unflatten(leaves), BufferInfo(ids, probabilities)

        return _Elements(read)

    def _pass(self, reader: PassReader) -> Iterator[tuple[Any, BufferInfo]]:
        window = functools.cache(reader.begin)  # taken by the first element

        def read(element: int) -> tuple[Any, BufferInfo] | None:
            found = reader.read(window(), element, 1)
            if found is None:
                return None
            leaves, ids = found
            return self._format.structure.unflatten([leaf[0] for leaf in leaves]), BufferInfo(ids[0], ())

        return _Elements(read)

    def _random_reader(
        self,
        steps: int | None,
        share: plan.Share,
        *,
        seed: Any,
        within_episodes: bool | str,
        shuffle: Shuffle = "exact",
    ) -> Sampler:
        if shuffle not in get_args(Shuffle):
            raise OptionError(f"shuffle must be one of {', '.join(map(repr, get_args(Shuffle)))}, got {shuffle!r}.")
        if shuffle == "resident" and within_episodes is not False:
            raise OptionError(
                f"within_episodes must be False with shuffle='resident', got {within_episodes!r}. Use shuffle='exact'."
            )
        source, given = self._readers_source(within_episodes), seed_of(seed)
        self._check_steps(steps or 1)
        if shuffle == "exact":
            return self._new_sampler(source, seed=given, share=share)
        return ResidentSampler(
            source,
            seed=plan.derive_seed(self._seed, next(self._streams)) if given is None else given,
            share=share,
            cache_bytes=self._opened().cache_bytes,
            num_steps=steps or 1,
        )

    def _pass_reader(
        self, size: int | None, steps: int | None, share: plan.Share, *, seed: Any, within_episodes: bool | str
    ) -> PassReader:
        seed_of(seed)  # a pass draws nothing
        if within_episodes is not False:
            raise OptionError(
                f"within_episodes must be False with single_deterministic_pass, got {within_episodes!r}. "
                "Read episode by episode: diskbuf.episodes lists them."
            )
        self._opened()
        request = plan.PassRequest(
            sample_batch_size=size,
            num_steps=steps,
            window_shift=self._window_shift,
            drop_remainder=self._drop_remainder,
        )
        self._check_pass(request)
        return PassReader(self._readers_source(within_episodes=False), request, share)

    def _episode_index(self, within_episodes: bool | str) -> "EpisodeIndex | None":
        """Where episodes end, kept for the next reader; None for sequences that may cross an end."""
        if within_episodes is False:
            return None
        from diskbuf.episode_index import EpisodeIndex

        ends = within_episodes if isinstance(within_episodes, str) else None
        if ends is None:
            flag("within_episodes", within_episodes)
        index = self._episode_indices.get(ends)
        if index is None:
            index = self._episode_indices[ends] = EpisodeIndex(self._opened(), ends=ends)
        return index

    def _check_pass(self, request: plan.PassRequest) -> None:
        size, steps = request.sample_batch_size or 1, request.num_steps or 1
        if not request.drop_remainder:
            return
        if size > self.batch_size:
            raise OptionError(
                f"sample_batch_size must be at most the {self.batch_size} lanes when dataset_drop_remainder is set, "
                f"got {size}: ALL data will be dropped by the deterministic dataset. Make it smaller."
            )
        if steps > self._opened().most_ids:
            raise OptionError(
                f"num_steps must be at most max_length, {self._opened().most_ids}, when dataset_drop_remainder is set, "
                f"got {steps}: ALL data will be dropped by the deterministic dataset. Make it smaller."
            )

    # ---- keeping

    def refresh(self) -> bool:
        """Looks for steps that were published since a remote store was opened, or last refreshed.

        Steps of a store on this machine are seen at once, without this.

        Returns:
            Whether there was something new.

        Raises:
            StoreCorruptError: When another store is there now.
            StoreUnreachableError: When requests failed, and failed again.
            ClosedError: After `close`.
        """
        store = self._opened()
        return isinstance(store, RemoteStore) and store.refresh()

    def flush(self) -> None:
        """Brings everything added so far to the disk, so that it survives a power cut.

        Raises:
            ReadOnlyError: When the buffer was opened for reading.
            ClosedError: After `close`.
            OSError: When something can't be written; what was on the disk before still is.
        """
        if self._writer is None:
            raise self._not_writable()
        self._writer.flush()

    def publish_now(self) -> None:
        """Publishes everything added so far to `publish_to`, without waiting for `publish_seconds` to pass.

        Raises:
            OptionError: When the buffer was opened without `publish_to`.
            ReadOnlyError: When the buffer was opened for reading.
            ClosedError: After `close`.
            StoreExistsError: When another store is there now.
            StoreAccessError: When writing is refused.
            StoreUnreachableError: When requests failed, and failed again. Readers go on seeing what was published
                before.
            OSError: When something can't be written here.
        """
        if self._writer is None:
            raise self._not_writable()
        self._writer.publish()

    def close(self) -> None:
        """Flushes, publishes and closes; a private store is removed. Closing twice is fine.

        What can't be published is a warning: the steps are safe here, and the next opening with `publish_to` goes on.

        Raises:
            OSError: When the flush fails; the buffer is closed all the same.
        """
        store, self._held.store, self._writer = self._store, None, None
        try:
            if store is not None:
                store.close()
        finally:
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what can be wrong

    def _opened(self) -> Store:
        return self._held.opened()

    def _not_writable(self) -> ReadOnlyError | ClosedError:
        with contextlib.suppress(ClosedError):
            self._opened()
            return ReadOnlyError(
                f"buffer {self._path} must be open for writing, but was opened with mode='r'. Open it with mode='r+'."
            )
        return ClosedError(f"buffer {self._path} must be open, but was closed. Open it again with mode='r+'.")

    def _check_steps(self, num_steps: int) -> None:
        """Refuses at the call what no element could ever hold. A writable buffer may still grow."""
        store = self._opened()
        window = store.window()
        if self._writer is None and longest_run(store, window) < num_steps:
            raise self._own_source().too_few(store, window, num_steps)
        if num_steps > store.most_ids:
            raise WindowError(f"num_steps must be at most max_length, {store.most_ids}, got {num_steps}.")


class _Elements(Iterator[tuple[Any, BufferInfo]]):
    """Elements by number. One that fails is tried again by the next `next`: a generator would seem to have ended."""

    def __init__(self, read: "Callable[[int], tuple[Any, BufferInfo] | None]") -> None:
        self._read = read
        self._number = 0

    def __next__(self) -> tuple[Any, BufferInfo]:
        element = self._read(self._number)
        if element is None:
            raise StopIteration
        self._number += 1
        return element


class _HeldStore:
    """The store of a buffer, for readers that must not hold the buffer itself."""

    def __init__(self, store: Store) -> None:
        self.store: Store | None = store
        self._path = store.path

    def opened(self) -> Store:
        """Returns the store.

        Raises:
            ClosedError: When it was closed.
        """
        if self.store is None:
            raise ClosedError(f"buffer {self._path} must be open, but was closed. Open it again with diskbuf.open.")
        return self.store


def open(
    path: str | os.PathLike[str],
    mode: Literal["r", "r+"] = "r",
    history: bool = False,
    *,
    follow: bool = False,
    storage_options: "Mapping[str, Any] | None" = None,
    skip_damaged: bool = False,
    verify: bool = False,
    seed: int | None = None,
    dataset_drop_remainder: bool = False,
    dataset_window_shift: int | None = None,
    options: StoreOptions | None = None,
    read_options: ReadOptions | None = None,
    publish_to: str | None = None,
    publish_seconds: float = 60.0,
    keep_local: bool = True,
) -> UniformReplayBuffer:
    """Opens an existing store from its path or URL alone.

    Reading needs no write permission, leaves nothing in the store, and sees the steps of a writer in another process at
    once. Of a remote store it sees what was published when it was opened, or last refreshed.

        buffer = diskbuf.open("s3://bucket/runs/cartpole.zarr", storage_options={"anon": True})

    Args:
        path: The store's folder, or a URL that fsspec can open: ``s3://``, ``gs://``, ``az://``, ``https://``, ...
        mode: "r" to read, "r+" to also add.
        history: Whether to read from the oldest step still on disk, where the store keeps history.
        follow: Whether to look for what was published since, at most every `ReadOptions.follow_seconds`, whenever
            something is read. Of a store on this machine everything is seen at once in any case.
        storage_options: What fsspec's file system of the URL's protocol takes: keys, endpoints.
        skip_damaged: Whether to read a store of which chunk files are missing or short: the window is then the longest
            run of whole steps, and a warning names the files. Only to read.
        verify: Whether each sealed chunk is checked against its checksum when it is first read; reading one that has
            rotten raises StoreCorruptError with its name. Only to read.
        seed: Makes samples repeatable; None draws a seed.
        dataset_drop_remainder: As in `UniformReplayBuffer`.
        dataset_window_shift: As in `UniformReplayBuffer`.
        options: How it is synced when written to.
        read_options: How chunks are read that are compressed, or not here.
        publish_to: As in `UniformReplayBuffer`; only to add, like the next two.
        publish_seconds: As in `UniformReplayBuffer`.
        keep_local: As in `UniformReplayBuffer`.

    Returns:
        The buffer.

    Raises:
        StoreNotFoundError: When there is no store; none is made.
        StoreLockedError: When mode is "r+" and another process writes it.
        StoreLockUnsupportedError: When mode is "r+" and its file system doesn't lock files.
        StoreMismatchError: When another kind of buffer made it.
        StoreFormatError: When a newer version wrote it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
        StoreExistsError: When `publish_to` holds something else than what was published of this store.
        StoreAccessError: When a remote store refuses the credentials.
        StoreUnreachableError: When requests to it failed, and failed again.
        MissingExtraError: When the package for the URL's protocol isn't installed.
        OptionError: When an argument is outside its rule.
    """
    if mode not in ("r", "r+"):
        raise OptionError(
            f"mode must be 'r' (read) or 'r+' (read and add), got {mode!r}. To create a store, use UniformReplayBuffer."
        )
    if mode == "r+" and (flag("skip_damaged", skip_damaged) or flag("verify", verify)):
        raise OptionError("skip_damaged and verify must be left out with mode='r+'. Run diskbuf.repair before adding.")
    publish = PublishOptions(
        url=publish_to, seconds=publish_seconds, keep_local=keep_local, storage_options=storage_options
    )
    if mode == "r" and publish_to is not None:
        raise OptionError(f"publish_to must be left out with mode='r', got {publish_to!r}. Whoever writes publishes.")
    reopen = functools.partial(
        open,
        history=history,
        follow=follow,
        storage_options=storage_options,
        skip_damaged=skip_damaged,
        verify=verify,
        seed=seed,
        dataset_drop_remainder=dataset_drop_remainder,
        dataset_window_shift=dataset_window_shift,
        read_options=read_options,
    )
    buffer = UniformReplayBuffer.__new__(UniformReplayBuffer)
    buffer._set_reading(seed, dataset_drop_remainder=dataset_drop_remainder, dataset_window_shift=dataset_window_shift)
    place = place_of(path)
    is_followed = flag("follow", follow)
    store: Store
    if isinstance(place, str):
        if mode != "r" or flag("skip_damaged", skip_damaged):
            raise OptionError(
                f"mode='r+' and skip_damaged must be left out with the URL of a remote store, got {place!r}. Write a "
                "store here, and publish it with publish_to; or copy it here with diskbuf.copy."
            )
        store, item_format = open_remote(
            place,
            kind=_KIND,
            reads_history=flag("history", history),
            storage_options=storage_options,
            read_options=_read_options(read_options),
            is_followed=is_followed,
        )
    else:
        store, item_format = open_existing(
            place,
            kind=_KIND,
            is_writable=mode == "r+",
            reads_history=flag("history", history),
            options=_options(options),
            only=_whole_ids(place) if flag("skip_damaged", skip_damaged) else None,
            verifies=flag("verify", verify),
            read_options=_read_options(read_options),
            publish=publish,
        )
    buffer._reopen = reopen if mode == "r" else None
    buffer._remove = _nothing
    buffer._set_store(store, item_format)
    return buffer


def _whole_ids(path: Path) -> tuple[int, int] | None:
    """The longest run of whole ids of a damaged store, None for one that isn't damaged."""
    from diskbuf.maintenance import longest_whole_run

    first_id, next_id, faults = longest_whole_run(path)
    if not faults:
        return None
    lines = "\n  ".join(fault.message for fault in faults)
    warnings.warn(
        f"{path} is damaged; only ids {first_id} to {next_id} are read. Run diskbuf.repair.\n  {lines}",
        RuntimeWarning,
        stacklevel=3,
    )
    return first_id, next_id


def _check_pass_is_in_order(shuffle: Shuffle) -> None:
    if shuffle != "exact":
        raise OptionError(f"shuffle must be left out with single_deterministic_pass, got {shuffle!r}.")


def _size_and_steps(sample_batch_size: Any, num_steps: Any) -> tuple[int | None, int | None]:
    size = None if sample_batch_size is None else count("sample_batch_size", sample_batch_size)
    return size, None if num_steps is None else count("num_steps", num_steps)


def flag(name: str, value: Any) -> bool:
    """Returns an argument that says yes or no.

    Raises:
        OptionError: When it isn't a bool.
    """
    if not isinstance(value, bool | np.bool):
        raise OptionError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def _options(options: StoreOptions | None) -> StoreOptions:
    if options is None:
        return StoreOptions()
    if not isinstance(options, StoreOptions):
        raise OptionError(f"options must be a diskbuf.StoreOptions, got {options!r}.")
    return options


def _read_options(options: ReadOptions | None) -> ReadOptions:
    if options is None:
        return ReadOptions()
    if not isinstance(options, ReadOptions):
        raise OptionError(f"read_options must be a diskbuf.ReadOptions, got {options!r}.")
    return options


def _ints(name: str, value: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise OptionError(f"{name} must be ints, got {array.dtype}.")
    return array.astype(np.int64)


def _broadcast(ids: NDArray[np.int64], lanes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    try:
        chosen, of_lane = np.broadcast_arrays(ids, lanes)
    except ValueError as error:
        raise OptionError(
            f"ids and lanes must have shapes that fit each other, got {ids.shape} and {lanes.shape}."
        ) from error
    return chosen, of_lane


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _nothing() -> None:
    pass


_open_buffers: "weakref.WeakSet[UniformReplayBuffer]" = weakref.WeakSet()


def _draw_anew_in_child() -> None:
    for buffer in list(_open_buffers):
        buffer.draw_anew()


os.register_at_fork(after_in_child=_draw_anew_in_child)


def _remove_private(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not from a forked child
        shutil.rmtree(folder, ignore_errors=True)
