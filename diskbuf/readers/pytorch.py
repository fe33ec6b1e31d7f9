"""A buffer's rows as a PyTorch dataset, to be read in this process or by the workers of a `DataLoader`.

Train on a store that another process made, or is making:

    import torch
    from diskbuf.readers import torch_dataset

    dataset = torch_dataset("runs/steps.zarr", sample_batch_size=64, num_steps=2, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _, (steps, info) in zip(range(100), loader):  # the loader is endless
        loss = (model(steps["observation"])[..., 0] - steps["reward"]).square().mean()  # of [64, 2]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

`batch_size=None` because elements are batches already. Torch is imported when a dataset is made.
"""

import dataclasses
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diskbuf import plan
from diskbuf.errors import MissingExtraError, OptionError, SpecError
from diskbuf.readers.agreed_window import AgreedWindow
from diskbuf.readers.requests import seed_of, share_of
from diskbuf.readers.rows import Pass, PassReader
from diskbuf.replay_buffers.opening import place_of
from diskbuf.replay_buffers.uniform import BufferInfo, UniformReplayBuffer, flag
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import tensorflow as tf
    import torch


def torch_dataset(
    buffer: UniformReplayBuffer | str | os.PathLike[str],
    sample_batch_size: int | None = None,
    num_steps: int | None = None,
    single_deterministic_pass: bool = False,
    *,
    seed: int | None = None,
    start: int = 0,
    shard: "tuple[int, int] | tf.distribute.InputContext | None" = None,
    within_episodes: bool | str = False,
) -> "torch.utils.data.IterableDataset":
    """Returns a `torch.utils.data.IterableDataset` of (items, BufferInfo), structured like the buffer's data_spec.

    Its elements are those of `UniformReplayBuffer.as_numpy_iterator` as tensors that take over the arrays, without a
    copy: endless random samples, or with `single_deterministic_pass` every step once an epoch. Tensors have the spec's
    dtypes, all of which torch has; with uint16, uint32 and uint64 it can do little but `.to(...)` another.

    Meant for `DataLoader(dataset, batch_size=None, num_workers=N)`. The workers share the elements, and the loader
    gives the same ones in the same order with any number of them. Each opens the store for itself, read-only, when it
    begins, however workers are started; a buffer that was given is not touched in them. Without workers it is read
    directly, also while it is added to. A dataset pickles as a path and options, and is read by path where it arrives.

    A DataLoader makes lists of plain tuples, of the pair too; namedtuples and dicts stay what they are.
    `DataLoader(..., collate_fn=tuple)` leaves every element as it is.

    Args:
        buffer: The buffer, or the path of a store, which is opened for each iterator and closed behind it. For a store
            opened with options (history, dataset_drop_remainder), pass what `diskbuf.open` returns.
        sample_batch_size: Sequences to an element, in a pass lanes to an element; None for no batch axis.
        num_steps: Steps of a sequence; None for single steps without a time axis.
        single_deterministic_pass: Whether to visit every step once, in order; the window is taken when an iterator
            gives its first element, one for all workers.
        seed: Makes the elements repeatable: each iterator gives the same ones. With None each draws others: from the
            buffer's seed, or in workers from the DataLoader's, which `torch.manual_seed` and its `generator` set.
        start: Elements to leave out, counted as they come out of the DataLoader, of all workers together. To go on
            exactly after k elements, pass the same seed and start=k; the number of workers may be another.
        shard: (index, count) or an InputContext: of every `count` elements, read the one at `index`, for instance
            (rank, world_size). Workers share the elements of their shard. Shards of a pass fit together while nothing
            is added: the programs that read them don't agree on a window, as workers do.
        within_episodes: Whether sequences stay inside one episode: True where the spec has a step_type, or the path
            of a boolean leaf that is true in the last step of an episode.

    Returns:
        The dataset. What goes wrong while it is read (an empty buffer, a closed one) is raised as our own error, from
        a worker with its traceback in the message.

    Raises:
        MissingExtraError: When torch isn't installed.
        SpecError: When nothing in the spec tells where episodes end, or this torch lacks a dtype of it.
        WindowError: When num_steps can't be had.
        OptionError: When an argument is outside its rule.
        ClosedError: After the buffer's `close`.
        StoreError: When a store can't be opened, as in `diskbuf.open`.
    """
    dataset_class = _dataset_class()
    share = share_of(start, shard)
    reading = _Reading(
        opener=_opener_of(buffer),
        sample_batch_size=sample_batch_size,
        num_steps=num_steps,
        is_pass=flag("single_deterministic_pass", single_deterministic_pass),
        seed=seed_of(seed),
        share=share,
        within_episodes=within_episodes,
    )
    if isinstance(buffer, UniformReplayBuffer):
        reading.check(buffer)
        return dataset_class(reading, buffer)
    with reading.opener() as opened:
        reading.check(opened)
    return dataset_class(reading, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """What is read, as it is sent to other processes.

    Attributes:
        opener: Opens the store for reading; its first argument is the path.
        sample_batch_size: As in `torch_dataset`.
        num_steps: As in `torch_dataset`.
        is_pass: Whether it is a deterministic pass.
        seed: As in `torch_dataset`.
        share: Which elements, of all workers together.
        within_episodes: As in `torch_dataset`.
    """

    opener: functools.partial[UniformReplayBuffer]
    sample_batch_size: int | None
    num_steps: int | None
    is_pass: bool
    seed: int | None
    share: plan.Share
    within_episodes: bool | str

    def check(self, buffer: UniformReplayBuffer) -> None:
        """Raises what there is to raise before the first element.

        Raises:
            SpecError: When torch lacks a dtype of the spec, and as `as_numpy_iterator`.
            OptionError: As `as_numpy_iterator`.
            WindowError: As `as_numpy_iterator`.
            ClosedError: As `as_numpy_iterator`.
        """
        # With a seed, so that a look doesn't change what the buffer's own draws are.
        dataclasses.replace(self, seed=self.seed or 0).elements(buffer)
        structure = Structure(buffer.data_spec)
        for path, spec in zip(structure.paths, structure.flatten(buffer.data_spec), strict=True):
            try:
                _tensor(np.empty(0, spec.dtype))
            except TypeError as error:
                raise SpecError(
                    f"leaf {path!r} must be of a dtype that torch has, got {spec.dtype}. Use a newer torch.", path=path
                ) from error

    def elements(self, buffer: UniformReplayBuffer) -> Iterator[tuple[Any, BufferInfo]]:
        """Returns the elements as NumPy arrays."""
        return buffer.as_numpy_iterator(
            self.sample_batch_size,
            self.num_steps,
            self.is_pass,
            seed=self.seed,
            start=self.share.start,
            shard=(self.share.index, self.share.shards),
            within_episodes=self.within_episodes,
        )

    def elements_of_window(
        self, buffer: UniformReplayBuffer, take: Callable[[Callable[[], Pass]], Pass]
    ) -> Iterator[tuple[Any, BufferInfo]]:
        """Yields the elements of a pass whose window `take` says, given what takes that of this moment."""
        reader: PassReader = buffer._pass_reader(
            self.sample_batch_size,
            self.num_steps,
            self.share,
            seed=self.seed,
            within_episodes=self.within_episodes,
        )
        window = take(reader.begin)
        reader.begin()  # looks at the store after that moment, so that what the window holds is known here
        structure = Structure(buffer.data_spec)
        for element in itertools.count():
            found = reader.read(window, element, 1)
            if found is None:
                return
            leaves, ids = found
            yield structure.unflatten(leaf[0] for leaf in leaves), BufferInfo(ids[0], ())


def _opener_of(buffer: Any) -> functools.partial[UniformReplayBuffer]:
    """Returns what opens the store of a buffer or a path for reading, here or in another process."""
    if not isinstance(buffer, UniformReplayBuffer):
        if not isinstance(buffer, str | os.PathLike):
            raise OptionError(f"buffer must be a UniformReplayBuffer or the path of a store, got {buffer!r}.")
        return functools.partial(open_buffer, place_of(buffer))
    store = buffer._opened()
    if not store.is_writable:
        function, arguments = buffer.__reduce__()
        return functools.partial(function, *arguments)
    return functools.partial(
        open_buffer,
        buffer.path,
        history=store._reads_history,
        seed=buffer._seed if buffer._has_own_seed else None,
        dataset_drop_remainder=buffer._drop_remainder,
        dataset_window_shift=buffer._window_shift,
    )


def worker_share(share: plan.Share, worker: int, workers: int) -> plan.Share:
    """Returns which of a share's elements a worker reads, so that workers taken in turn give them in order.

    Args:
        share: The elements of all workers together.
        worker: Number of this one, from 0; the first element is read by worker 0.
        workers: How many there are.
    """
    start, turn = divmod(share.start + worker, workers)
    return plan.Share(start=start, index=share.index + share.shards * turn, shards=share.shards * workers)


def _tensor(value: Any) -> Any:
    """Returns a tensor of an array's own memory; of a scalar, or of memory that isn't to be written, a copy."""
    import torch

    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _tensors(elements: Iterator[tuple[Any, BufferInfo]], data_spec: Any) -> Iterator[tuple[Any, BufferInfo]]:
    structure = Structure(data_spec)
    for items, info in elements:
        probabilities = info.probabilities if isinstance(info.probabilities, tuple) else _tensor(info.probabilities)
        leaves = map(_tensor, structure.flatten(items))
        yield structure.unflatten(leaves), BufferInfo(_tensor(info.ids), probabilities)


def _restored(reading: _Reading, window: Path | None) -> Any:
    """Makes a dataset anew in the process that it was sent to."""
    return _dataset_class()(reading, None, window)


@functools.cache
def _dataset_class() -> Any:
    """Makes the class of the datasets, which needs torch's.

    Raises:
        MissingExtraError: When torch isn't installed.
    """
    try:
        import torch  # noqa: F401 - to tell a missing torch from one that can't be loaded
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "torch_dataset needs torch, which isn't installed. Install it with: pip install 'diskbuf[torch]'."
        ) from error
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchDataset(IterableDataset):  # type: ignore[misc]  # torch ships no types that we check
        """What `torch_dataset` returns."""

        def __init__(self, reading: _Reading, buffer: UniformReplayBuffer | None, window: Path | None = None) -> None:
            self._reading = reading
            self._buffer = buffer
            self._window = AgreedWindow(window) if reading.is_pass else None
            self._process = os.getpid()
            self._iterators = itertools.count()

        def __iter__(self) -> Iterator[tuple[Any, BufferInfo]]:
            worker = get_worker_info()
            if self._buffer is not None:
                self._buffer._opened()
            if worker is not None:
                return self._read_as_worker(worker, next(self._iterators))
            if self._buffer is None or os.getpid() != self._process:
                return self._read_by_path()
            return _tensors(self._reading.elements(self._buffer), self._buffer.data_spec)

        def _read_by_path(self) -> Iterator[tuple[Any, BufferInfo]]:
            with self._reading.opener() as opened:
                yield from _tensors(self._reading.elements(opened), opened.data_spec)

        def _read_as_worker(self, worker: Any, number: int) -> Iterator[tuple[Any, BufferInfo]]:
            # Workers are told one seed, each with its number added; those that stay for several epochs keep it.
            common = worker.seed - worker.id
            reading = dataclasses.replace(
                self._reading,
                seed=plan.derive_seed(common, number) if self._reading.seed is None else self._reading.seed,
                share=worker_share(self._reading.share, worker.id, worker.num_workers),
            )
            with reading.opener() as opened:
                if self._window is None:
                    elements = reading.elements(opened)
                else:
                    parent = multiprocessing.parent_process()
                    name = f"{parent.pid if parent else None}/{common}/{number}"
                    elements = reading.elements_of_window(opened, functools.partial(self._window.take, name, worker.id))
                yield from _tensors(elements, opened.data_spec)

        def __reduce__(self) -> tuple[Any, ...]:
            if self._buffer is not None:
                self._buffer._opened()
            is_for_child = context.get_spawning_popen() is not None
            return _restored, (self._reading, self._window.path if self._window and is_for_child else None)

        def __repr__(self) -> str:
            read = self._reading
            source = read.opener.args[0] if self._buffer is None else self._buffer
            kind = "a pass" if read.is_pass else "random"
            return (
                f"<TorchDataset of {source} ({kind}), sample_batch_size={read.sample_batch_size}, "
                f"num_steps={read.num_steps}>"
            )

    return TorchDataset
