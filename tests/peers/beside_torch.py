"""Tests of `torch_dataset` beside PyTorch, which tests/test_torch.py runs in the environment of `make peers`."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
from coded_rows import SPEC, Pair, assert_equal, assert_rows, lanes_of, span, step
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import diskbuf
from diskbuf import ArraySpec, BufferInfo, StoreOptions, UniformReplayBuffer
from diskbuf.readers import pytorch, torch_dataset

NEVER = StoreOptions(fsync="never")
# Torch finds that three workers are many for two processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def filled(added: int, lanes: int = 2, max_length: int | None = 20, **arguments: Any) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, lanes, max_length, **{"options": NEVER, **arguments})
    for step_id in range(added):
        buffer.add_batch(step(step_id, lanes))
    return buffer


def loader_of(dataset: Any, workers: int = 0, how: str = "fork", **arguments: Any) -> Any:
    context = {"multiprocessing_context": how} if workers else {}
    return DataLoader(dataset, batch_size=None, collate_fn=tuple, num_workers=workers, **context, **arguments)


def arrays(element: Any) -> Any:
    """The element with arrays for tensors; everything in it is a tensor."""
    leaves, structure = optree.tree_flatten(tuple(element))
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return optree.tree_unflatten(structure, [leaf.numpy() for leaf in leaves])


def taken(elements: Any, number: int | None = None) -> list[Any]:
    return [arrays(element) for element in itertools.islice(elements, number)]


def assert_same_elements(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for element, other in zip(found, expected, strict=True):
        assert_equal(element, other)


def ids_of(elements: Any, number: int | None = None) -> list[Any]:
    return [info.ids.tolist() for _, info in itertools.islice(elements, number)]


def assert_fails(source: Any, error: type[Exception], message: str) -> None:
    """The first element is an error."""
    elements = None
    with pytest.raises(error, match=message):
        next(elements := iter(source))
    if hasattr(elements, "_shutdown_workers"):
        elements._shutdown_workers()  # else torch waits for them for seconds when its iterator is collected


@contextlib.contextmanager
def writing(write: Callable[[int], None], at: int) -> Iterator[None]:
    """Calls write(at), write(at + 1) and so on in a thread, about two thousand times a second."""
    is_done = threading.Event()

    def go_on() -> None:
        for number in itertools.count(at):
            if is_done.wait(0.0005):
                return
            write(number)

    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        yield
    finally:
        is_done.set()
        writer.join()


# ---- the same elements as NumPy's


@pytest.mark.parametrize("is_pass", [False, True])
@pytest.mark.parametrize(("size", "num_steps"), [(None, None), (3, None), (None, 4), (3, 4), (1, 1)])
def test_elements_are_those_of_the_numpy_iterator(size: int | None, num_steps: int | None, is_pass: bool) -> None:
    with filled(33, 4) as buffer:
        dataset = torch_dataset(buffer, size, num_steps, is_pass, seed=3)
        assert isinstance(dataset, IterableDataset)
        number = None if is_pass else 20
        expected = list(itertools.islice(buffer.as_numpy_iterator(size, num_steps, is_pass, seed=3), number))
        for source in (
            dataset,
            loader_of(dataset),
            loader_of(torch_dataset(buffer.path, size, num_steps, is_pass, seed=3)),
        ):
            found = taken(source, number)
            assert_same_elements(found, expected)
            assert all(type(items["pair"]) is Pair and type(info) is BufferInfo for items, info in found)


def test_tensors_take_over_the_arrays_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = UniformReplayBuffer.as_numpy_iterator

    def noted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for element in read(*arguments, **options):
            seen.append(optree.tree_leaves(element))
            yield element

    monkeypatch.setattr(UniformReplayBuffer, "as_numpy_iterator", noted)
    with filled(33, 4) as buffer:
        for arguments in ((3, 4), (3, 4, True)):
            for element in itertools.islice(torch_dataset(buffer, *arguments), 3):
                tensors = optree.tree_leaves(element)
                assert [tensor.data_ptr() for tensor in tensors] == [leaf.ctypes.data for leaf in seen[-1]]
                for tensor in tensors:
                    tensor.zero_()  # they are the reader's own
        assert_equal(buffer.gather_all(), span(13, 33, 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_dtype_keeps_its_values(workers: int) -> None:
    ends = {dtype: np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1], dtype) for dtype in DTYPES if "int" in dtype}
    ends |= {
        dtype: np.array([np.finfo(dtype).min, np.finfo(dtype).tiny, np.nan], dtype)
        for dtype in DTYPES
        if "float" in dtype
    }
    ends |= {"bool": np.array([False, True, True])}
    ends |= {dtype: np.array([1 + 2j, -0.0, np.inf], dtype) for dtype in DTYPES if "complex" in dtype}
    assert sorted(ends) == sorted(DTYPES)
    with UniformReplayBuffer({dtype: ArraySpec([3], dtype) for dtype in DTYPES}, options=NEVER) as buffer:
        buffer.add_batch({dtype: row[None] for dtype, row in ends.items()})
        for items, _ in itertools.islice(loader_of(torch_dataset(buffer), workers), 3):
            for dtype, row in ends.items():
                assert items[dtype].dtype is getattr(torch, dtype)
                assert items[dtype].numpy().tobytes() == row.tobytes()


def test_a_dtype_that_torch_lacks_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from_numpy = torch.from_numpy

    def older(array: Any) -> Any:
        if array.dtype == np.uint16:
            raise TypeError("can't convert np.ndarray of type numpy.uint16.")
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", older)
    with UniformReplayBuffer({"a": ArraySpec([], "int8"), "b": (ArraySpec([], "uint16"),)}) as buffer:
        with pytest.raises(
            diskbuf.SpecError, match="leaf 'b/0' must be of a dtype that torch has, got uint16"
        ) as caught:
            torch_dataset(buffer)
        assert caught.value.path == "b/0"


# ---- workers


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_workers_share_the_elements_and_the_loader_gives_them_in_order(how: str, tmp_path: Path) -> None:
    with filled(33, 4, path=tmp_path / "a") as buffer:
        expected = list(buffer.as_numpy_iterator(2, 3, True))
        loader = loader_of(torch_dataset(buffer, 2, 3, True), 2, how, persistent_workers=True, prefetch_factor=4)
        for _ in range(3):  # every step once an epoch
            assert_same_elements(taken(loader), expected)
        del loader
        shard = {"shard": (1, 2), "start": 3, "seed": 5}
        expected = list(itertools.islice(buffer.as_numpy_iterator(2, 3, **shard), 12))
        dataset = torch_dataset(buffer.path, 2, 3, **shard)
        assert_same_elements(taken(loader_of(dataset, 2, how), 12), expected)


def test_shards_of_workers_are_all_elements_each_once() -> None:
    with filled(33, 4) as buffer:
        alone = ids_of(buffer.as_numpy_iterator(1, 3, seed=1), 36)
        shared = [ids_of(loader_of(torch_dataset(buffer, 1, 3, seed=1, shard=(rank, 3)), 2), 12) for rank in range(3)]
        assert [ids for turn in zip(*shared, strict=True) for ids in turn] == alone
        count = len(list(buffer.as_numpy_iterator(1, 3, True)))
        passes = [len(ids_of(loader_of(torch_dataset(buffer, 1, 3, True, shard=(rank, 3)), 2))) for rank in range(3)]
        assert sum(passes) == count


@pytest.mark.parametrize("is_pass", [False, True])
def test_a_read_goes_on_exactly_with_another_number_of_workers(is_pass: bool) -> None:
    with filled(33, 4) as buffer:
        unbroken = list(itertools.islice(buffer.as_numpy_iterator(2, 2, is_pass, seed=8), 20))
        for before, after, at in ((2, 3, 7), (0, 2, 4), (3, 0, 5)):
            first = taken(loader_of(torch_dataset(buffer, 2, 2, is_pass, seed=8), before), at)
            rest = taken(loader_of(torch_dataset(buffer, 2, 2, is_pass, seed=8, start=at), after), 20 - at)
            assert_same_elements(first + rest, unbroken)


def test_what_a_buffer_was_opened_with_goes_to_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    options: dict[str, Any] = {"dataset_drop_remainder": True, "dataset_window_shift": 2}
    with filled(43, 3, keep_history=True, path=path, **options) as buffer:
        assert_same_elements(
            taken(loader_of(torch_dataset(buffer, 2, 3, True), 2)), list(buffer.as_numpy_iterator(2, 3, True))
        )
    for mode in ("r", "r+"):
        with diskbuf.open(path, mode, history=True, **options) as buffer:
            found = taken(loader_of(torch_dataset(buffer, 2, 3, True), 2))
            assert_same_elements(found, list(buffer.as_numpy_iterator(2, 3, True)))
            assert found[0][1].ids[0, 0] == 0
            assert pickle.loads(pickle.dumps(torch_dataset(buffer, 2, 3, True)))._reading.opener.keywords["history"]


def test_samples_within_episodes_stay_inside_them_in_workers() -> None:
    spec = {"number": ArraySpec([], "int64"), "done": ArraySpec([], "bool")}
    ids = np.arange(60)[None, :]
    with UniformReplayBuffer(spec, options=NEVER) as buffer:
        buffer.extend({"number": ids, "done": ids % 3 == 2})
        for items, _ in itertools.islice(loader_of(torch_dataset(buffer, 50, 3, within_episodes="done"), 2), 4):
            assert (items["number"][:, 0] % 3 == 0).all()


# ---- seeds


@pytest.mark.parametrize("is_persistent", [False, True])
def test_without_a_seed_each_epoch_draws_anew_as_torch_is_seeded(is_persistent: bool) -> None:
    with filled(33, 4) as buffer:

        def epochs(workers: int) -> list[Any]:
            torch.manual_seed(5)
            loader = loader_of(torch_dataset(buffer, 8), workers, persistent_workers=is_persistent)
            return [ids_of(loader, 4) for _ in range(2)]

        first, second = epochs(2)
        assert epochs(2) == epochs(3) == [first, second]
        drawn = [tuple(ids) for ids in first + second]
        assert len(set(drawn)) == 8  # neither epochs nor workers repeat each other


def test_without_workers_a_seed_is_drawn_from_the_buffers() -> None:
    with filled(33, seed=3) as buffer, filled(33, seed=3) as other:
        dataset = torch_dataset(buffer, 8)  # making one draws nothing
        assert ids_of(dataset, 3) == ids_of(other.as_numpy_iterator(8), 3)
        assert ids_of(dataset, 3) == ids_of(other.as_numpy_iterator(8), 3)


# ---- live buffers


def test_a_live_buffer_is_read_directly_without_workers() -> None:
    with filled(3, max_length=2000) as buffer:
        elements = iter(loader_of(torch_dataset(buffer, 50, 2)))
        for next_id in range(4, 300):
            buffer.add_batch(step(next_id - 1, 2))
            items, info = arrays(next(elements))
            assert info.ids.max() < next_id
            assert_rows(items, info.ids, lanes_of(items)[:, :1])
        assert info.ids.max() > 250


def no_buffer_of_the_parent(_: int) -> None:
    get_worker_info().dataset._buffer.as_numpy_iterator = None  # a worker that reads by it fails


@pytest.mark.parametrize("max_length", [20, None])
def test_workers_read_beside_the_writer_that_they_were_forked_from(max_length: int | None) -> None:
    lanes = 3
    with filled(30, lanes, max_length) as buffer:
        with writing(lambda number: buffer.add_batch(step(number, lanes)), 30):
            for _ in range(3):
                loader = loader_of(torch_dataset(buffer, 8, 2), 2, worker_init_fn=no_buffer_of_the_parent)
                newest = 0
                for element in itertools.islice(loader, 200):
                    items, info = arrays(element)
                    assert_rows(items, info.ids, lanes_of(items)[:, :1])
                    newest = max(newest, int(info.ids.max()))
                assert newest > 30
        added = buffer.next_id
        buffer.add_batch(step(added, lanes))  # no child has taken anything from the writer
        assert buffer.next_id == added + 1


def test_workers_pass_through_one_window_while_a_writer_adds() -> None:
    with filled(200, 1, None) as buffer:
        dataset = torch_dataset(buffer, 1, 16, True)
        with writing(lambda number: buffer.add_batch(step(number, 1)), 200):
            last = 0
            for workers, how in ((4, "fork"), (2, "spawn")):
                loader = loader_of(dataset, workers, how, persistent_workers=True)
                for _ in range(3):
                    ids = np.concatenate([info.ids.numpy().ravel() for _, info in loader])
                    np.testing.assert_array_equal(ids, np.arange(len(ids)))
                    assert len(ids) > max(last, 200)  # of the moment at which the epoch began
                    last = len(ids)


def test_a_child_that_is_no_worker_reads_by_path() -> None:
    with filled(33) as buffer:
        dataset = torch_dataset(buffer, 4, 2, seed=1)
        expected = ids_of(dataset, 3)

        def read() -> None:
            buffer.as_numpy_iterator = None  # type: ignore[method-assign]
            sys.exit(ids_of(dataset, 3) != expected)

        child = multiprocessing.get_context("fork").Process(target=read)
        child.start()
        child.join(60)
        assert child.exitcode == 0


# ---- what is sent, and what is left


def test_a_dataset_of_a_writable_buffer_pickles_and_reads_by_path() -> None:
    with filled(33) as buffer:
        for is_pass in (False, True):
            dataset = torch_dataset(buffer, 4, 2, is_pass, seed=1)
            sent = pickle.loads(pickle.dumps(dataset))
            assert sent._buffer is None
            assert ids_of(sent, 5) == ids_of(dataset, 5) == ids_of(loader_of(sent, 2), 5)
            assert "TorchDataset of" in repr(sent)


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(33) as buffer:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        dataset = torch_dataset(buffer, 1, 2, True)
        for _ in range(2):
            assert len(ids_of(loader_of(dataset, 2))) == 20
        assert len(list(tmp_path.iterdir())) == 1
        del dataset
        gc.collect()
        assert list(tmp_path.iterdir()) == []


def resident_and_open(pids: list[int]) -> tuple[int, int]:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE"), sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_neither_memory_nor_files_grow_over_epochs(tmp_path: Path) -> None:
    filled(8, path=tmp_path / "a").close()
    loader = loader_of(torch_dataset(tmp_path / "a", 2, 2, True), 2, persistent_workers=True)
    sizes, opened = [], []
    for epoch in range(200):
        assert len(ids_of(loader)) == 4
        if epoch in (50, 199):
            gc.collect()
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            assert len(pids) == 3
            size, files = resident_and_open(pids)
            sizes.append(size)
            opened.append(files)
    assert sizes[1] - sizes[0] < 4 * 2**20
    assert opened[1] <= opened[0] + 6  # torch's queues keep some a little longer
    del loader
    plain = torch_dataset(tmp_path / "a", 2, 2, True)
    for epoch in range(200):
        assert len(ids_of(loader_of(plain))) == 4
        if epoch in (50, 199):
            sizes.append(resident_and_open([os.getpid()])[0])
    assert sizes[3] - sizes[2] < 4 * 2**20


# ---- what goes wrong


def test_a_dataset_of_a_closed_buffer_says_so() -> None:
    buffer = filled(33)
    dataset = torch_dataset(buffer, 4, 2)
    elements = iter(dataset)
    next(elements)
    buffer.close()
    with pytest.raises(diskbuf.ClosedError, match="must be open, but was closed"):
        next(elements)
    for source in (dataset, loader_of(dataset), loader_of(dataset, 2), loader_of(dataset, 2, "spawn")):
        assert_fails(source, diskbuf.ClosedError, "must be open, but was closed")
    with pytest.raises(diskbuf.ClosedError, match="must be open, but was closed"):
        pickle.dumps(dataset)
    with pytest.raises(diskbuf.ClosedError, match="must be open, but was closed"):
        torch_dataset(buffer)


def test_errors_come_out_of_workers_as_they_are(tmp_path: Path) -> None:
    with UniformReplayBuffer(SPEC, 2, 20, path=tmp_path / "a", options=NEVER) as buffer:
        for is_pass in (False, True):
            dataset = torch_dataset(buffer, 4, 2, is_pass)
            for workers in (0, 2):
                assert_fails(loader_of(dataset, workers), diskbuf.EmptyBufferError, "sampled, but is empty. Add some")
    filled(5, path=tmp_path / "b").close()
    dataset = torch_dataset(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "c")
    assert_fails(loader_of(dataset, 2), diskbuf.StoreNotFoundError, str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 1.5}, diskbuf.OptionError, "seed must be an int or None"),
        ({"start": -1}, diskbuf.OptionError, "start must be an int of at least 0"),
        ({"shard": (2, 2)}, diskbuf.OptionError, "shard must be an index from 0"),
        ({"sample_batch_size": 0}, diskbuf.OptionError, "sample_batch_size must be an int of at least 1"),
        ({"single_deterministic_pass": 1}, diskbuf.OptionError, "single_deterministic_pass must be True or False"),
        ({"within_episodes": "number"}, diskbuf.SpecError, "number"),
        ({"num_steps": 21}, diskbuf.WindowError, "num_steps must be at most"),
        ({"sample_batch": 3}, TypeError, "sample_batch"),
    ],
)
def test_an_argument_outside_its_rule_is_refused_at_the_call(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with filled(33) as buffer:
        for source in (buffer, buffer.path):
            with pytest.raises(error, match=message):
                torch_dataset(source, **arguments)


def test_what_is_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(diskbuf.OptionError, match="buffer must be a UniformReplayBuffer or the path of a store, got 3"):
        torch_dataset(3)  # type: ignore[arg-type]
    with pytest.raises(diskbuf.StoreNotFoundError):
        torch_dataset(tmp_path / "none")


# ---- torch's own handling of elements


def test_the_usual_loader_keeps_dicts_and_namedtuples() -> None:
    with filled(33) as buffer:
        dataset = torch_dataset(buffer, 4, 2, seed=1)
        for workers in (0, 2):
            items, info = next(iter(DataLoader(dataset, batch_size=None, num_workers=workers)))
            assert type(items) is dict
            assert type(items["pair"]) is Pair
            assert type(info) is BufferInfo
            assert_equal(arrays([info])[0], next(buffer.as_numpy_iterator(4, 2, seed=1))[1])


def test_elements_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU torch pins nothing: its walk through an element is tried, and that a loader takes the flag."""
    with filled(33) as buffer:
        dataset = torch_dataset(buffer, 4, 2, seed=1)
        expected = next(buffer.as_numpy_iterator(4, 2, seed=1))
        if not torch.cuda.is_available():
            monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        pinned = torch.utils.data._utils.pin_memory.pin_memory(next(iter(dataset)))
        assert_equal(arrays(pinned), expected)
        with (
            pytest.warns(UserWarning, match="pin_memory") if not torch.cuda.is_available() else contextlib.nullcontext()
        ):
            loader = loader_of(dataset, 2, pin_memory=True, prefetch_factor=3)
            assert_equal(taken(loader, 1)[0], expected)


# ---- training

WRITER = """
import sys
from typing import NamedTuple, Any
import numpy as np
import diskbuf

class Step(NamedTuple):
    observation: Any
    reward: Any

random = np.random.default_rng(0)
spec = Step(diskbuf.ArraySpec([4], "float32"), diskbuf.ArraySpec([], "float32"))
if sys.argv[2] == "dict":
    spec = spec._asdict()
with diskbuf.UniformReplayBuffer(spec, 8, 1000, path=sys.argv[1]) as buffer:
    observation = random.standard_normal([8, 200, 4]).astype("float32")
    items = Step(observation, observation @ np.array([1, -2, 3, 0.5], "float32"))
    buffer.extend(items._asdict() if sys.argv[2] == "dict" else items)
"""


def written_elsewhere(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", WRITER, path, kind], check=True, timeout=60)


def test_a_model_is_trained_from_a_store_that_another_process_made(tmp_path: Path) -> None:
    """Its items are of a class of that process, which neither this one nor the workers can import."""
    written_elsewhere(tmp_path / "steps.zarr", "namedtuple")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    dataset = torch_dataset(tmp_path / "steps.zarr", 64, 2, seed=0)
    losses = []
    for steps, _ in itertools.islice(DataLoader(dataset, batch_size=None, num_workers=2), 400):
        assert type(steps).__name__ == "Step"
        loss = (model(steps.observation)[..., 0] - steps.reward).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5
    assert losses[-1] < 0.05


def test_the_example_of_the_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_elsewhere(tmp_path / "runs" / "steps.zarr", "dict")
    monkeypatch.chdir(tmp_path)
    lines = itertools.takewhile(
        lambda line: not line or line.startswith("    "), pytorch.__doc__.partition(":\n\n")[2].splitlines()
    )
    found: dict[str, Any] = {}
    exec(textwrap.dedent("\n".join(lines)), found)
    assert found["loss"].isfinite()
    assert found["info"].ids.shape == (64, 2)
