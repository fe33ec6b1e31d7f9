"""What column statistics say, held against NumPy on all values at once."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import diskbuf
from diskbuf import statistics
from diskbuf.statistics import QUANTILES, column_statistics, save_statistics, saved_statistics

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def filled(values: np.ndarray, path: Path | None = None, **options: Any) -> diskbuf.UniformReplayBuffer:
    """A buffer whose leaf x holds [B, T, *shape]."""
    spec = {"x": diskbuf.ArraySpec(values.shape[2:], values.dtype)}
    buffer = diskbuf.UniformReplayBuffer(spec, values.shape[0], None, path=path, **options)
    buffer.extend({"x": values})
    return buffer


def of(values: np.ndarray, **options: Any) -> statistics.ColumnStatistics:
    with filled(values) as buffer:
        (column,) = column_statistics(buffer, **options).columns
    return column


def random_values(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind == np.bool:
        return rng.random(shape) < 0.3
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, shape, kind, endpoint=True)
    return (rng.standard_normal(shape) * 100).astype(kind)


def check(found: statistics.ColumnStatistics, values: np.ndarray, *, is_exact: bool) -> None:
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    assert found.count == flat.size
    assert found.nan_count == (np.isnan(flat).sum() if flat.dtype.kind == "f" else 0)
    assert found.infinity_count == flat.size - found.nan_count - finite.size
    if not finite.size:
        assert (found.minimum, found.mean, found.quantiles, found.bins) == (None, None, None, None)
        return
    assert found.minimum == finite.min()
    assert found.maximum == finite.max()
    wide = finite.astype(np.longdouble)
    assert found.mean == pytest.approx(float(wide.mean()), rel=1e-12, abs=1e-12 * float(abs(wide).max()))
    assert found.std == pytest.approx(float(wide.std()), rel=1e-9, abs=1e-12 * float(abs(wide).max()))
    assert found.is_exact == is_exact
    assert found.quantiles is not None
    assert found.bins is not None
    assert found.edges is not None
    if is_exact:
        assert sum(found.bins) == finite.size
        expected = np.quantile(wide, QUANTILES)
        for (q, value), wanted in zip(found.quantiles, expected, strict=True):
            assert value == pytest.approx(float(wanted), rel=1e-12, abs=1e-300), q
    if found.distinct_count is not None:
        different, counts = np.unique(finite, return_counts=True)
        assert found.distinct_count == len(different)
        if len(different) <= 20:
            assert found.distinct == tuple(zip(different.tolist(), counts.tolist(), strict=True))
        else:
            assert found.distinct is None


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_every_dtype_are_those_of_numpy(dtype: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_COLLECTED", 100)  # so that digits are followed to the end
    values = random_values(dtype, (3, 5000, 2), np.random.default_rng(1))
    counted = np.dtype(dtype).itemsize <= 2
    check(of(values, exact=exact, sample_size=1000), values, is_exact=exact or counted)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_two_columns(dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((2, 300)) + 1j * rng.standard_normal((2, 300))).astype(dtype)
    with filled(values) as buffer:
        real, imaginary = column_statistics(buffer).columns
    assert (real.path, imaginary.path, real.dtype) == ("x.real", "x.imag", dtype)
    check(real, values.real, is_exact=True)
    check(imaginary, values.imag, is_exact=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_values_come_out_as_numpy_has_them(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)))
    values = data.draw(arrays.arrays(dtype, shape))
    if dtype.kind == "f" and dtype.itemsize == 8:
        values = np.where(np.abs(values) > 1e150, np.float64(1), values)  # whose squares numpy can add up too
    exact = data.draw(st.booleans())
    check(of(values, exact=exact, sample_size=5), values, is_exact=_is_exact(values, exact))


def _is_exact(values: np.ndarray, exact: bool) -> bool:
    if exact or values.dtype.itemsize <= 2 or values.size <= 5:
        return True
    flat = values.reshape(-1)
    if values.dtype.kind == "f":
        finite = flat[np.isfinite(flat)]
        return bool(finite.size) and finite.min() == finite.max()
    return int(flat.max()) - int(flat.min()) < 2**16


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_and_the_infinities_are_counted_and_left_out(dtype: str) -> None:
    values = np.random.default_rng(2).standard_normal((2, 40_000)).astype(dtype)
    values[0, ::7], values[1, ::11], values[1, 1::13] = np.nan, np.inf, -np.inf
    for exact in (False, True):
        check(of(values, exact=exact), values, is_exact=exact or dtype == "float16" or values.size <= 100_000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_column_without_a_finite_value_has_counts_alone(value: float) -> None:
    values = np.full((1, 100), value)
    check(of(values), values, is_exact=True)
    check(of(values, exact=True, sample_size=3), values, is_exact=True)


def test_sums_of_large_ints_do_not_overflow() -> None:
    for dtype in ("int64", "uint64"):
        limits = np.iinfo(dtype)
        values = np.full((1, 10_000), limits.max, dtype)
        values[0, ::2] = limits.max - 10
        found = of(values)
        assert found.mean == float(limits.max - 5)
        assert found.std == pytest.approx(5.0)
        assert found.distinct == ((limits.max - 10, 5000), (limits.max, 5000))


def test_the_deviation_of_numbers_far_from_zero_keeps_its_digits() -> None:
    rng = np.random.default_rng(3)
    noise = rng.integers(-1000, 1000, (2, 300_000)) * 1000
    assert of(noise + 10**18).std == pytest.approx(noise.std(), rel=1e-12)
    assert of(noise / 2**10 + 2**40).std == pytest.approx((noise / 2**10).std(), rel=1e-9)


def test_squares_that_float64_has_no_room_for_are_no_matter() -> None:
    values = np.array([[1e308, -1e308] * 500])
    found = of(values)
    assert (found.mean, found.minimum, found.maximum) == (0.0, -1e308, 1e308)
    assert found.std == pytest.approx(1e308)
    assert sum(found.bins or ()) == 1000


def test_of_large_arrays_of_bytes_the_limits_are_exact_and_the_moments_a_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "_COUNTED_BYTES", 1000)
    values = np.random.default_rng(4).integers(2, 250, (2, 300, 99, 101)).astype("uint8")
    values[1, 299, 98, 100], values[0, 200, 3, 3] = 255, 0
    found = of(values)
    assert (found.distinct_count, found.is_exact) == (None, False)
    assert (found.count, found.minimum, found.maximum) == (values.size, 0, 255)
    assert found.mean == pytest.approx(values.mean(dtype=np.float64), abs=1)
    assert found.std == pytest.approx(values.std(dtype=np.float64), abs=1)
    signed = (values.astype(int) - 128).astype("int8")
    assert of(signed).mean == pytest.approx(signed.mean(dtype=np.float64), abs=1)
    check(of(values, exact=True), values, is_exact=True)


def test_a_sample_is_near_and_the_same_for_a_seed() -> None:
    values = np.random.default_rng(5).standard_normal((4, 20_000, 3))
    one, same, other = (of(values, sample_size=5000, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.quantiles != other.quantiles
    assert not one.is_exact
    assert sum(one.bins or ()) == 5000
    for (_, value), wanted in zip(one.quantiles or (), np.quantile(values, QUANTILES), strict=True):
        assert value == pytest.approx(wanted, abs=0.1)


def test_the_sample_is_uniform_over_steps_lanes_and_elements() -> None:
    values = np.arange(4 * 5000 * 3).reshape(4, 5000, 3) * 1e6  # each value once, and not countable
    with filled(values) as buffer:
        taken: list[np.ndarray] = []
        merge = statistics._Column.merge

        def listen(column: Any, part: Any) -> None:
            taken.append(part.sample)
            merge(column, part)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics._Column, "merge", listen)
            column_statistics(buffer, sample_size=6000)
    numbers = (np.concatenate(taken) / 1e6).astype(int)
    for part, count in ((numbers // 15_000, 4), (numbers % 15_000 // 3 // 500, 10), (numbers % 3, 3)):
        found = np.bincount(part, minlength=count)
        assert (abs(found - 6000 / count) < 5 * np.sqrt(6000 / count)).all()


def test_a_constant_column_is_told_exactly_from_any_sample() -> None:
    found = of(np.full((1, 1000), 0.5, "float32"), sample_size=10)
    assert found.is_exact
    assert found.distinct == ((0.5, 1000),)
    assert found.quantiles == tuple((q, 0.5) for q in QUANTILES)


def test_only_chosen_columns_are_read(tmp_path: Path) -> None:
    spec = {"a": diskbuf.ArraySpec([], "int64"), "b": diskbuf.ArraySpec([], "float32")}
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "s") as buffer:
        buffer.extend({"a": np.arange(10)[None], "b": np.ones((1, 10), "float32")})
        found = column_statistics(buffer, ["b", "a", "b"])
        assert [column.path for column in found.columns] == ["b", "a"]
        assert (found.first_id, found.next_id, found.lanes) == (0, 10, 1)
        with pytest.raises(diskbuf.OptionError, match="columns must be one or more of 'a', 'b'"):
            column_statistics(buffer, ["c"])


def test_an_empty_window_has_no_statistics() -> None:
    with diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([2], "float32")}) as buffer:
        for exact in (False, True):
            (column,) = column_statistics(buffer, exact=exact).columns
            assert (column.count, column.mean, column.quantiles) == (0, None, None)


@pytest.mark.parametrize("options", [{"sample_size": 0}, {"sample_size": 1.5}, {"seed": -1}, {"exact": 1}])
def test_options_outside_of_their_rule_are_refused(options: dict[str, Any]) -> None:
    with filled(np.zeros((1, 3))) as buffer, pytest.raises(diskbuf.OptionError, match="must be"):
        column_statistics(buffer, **options)


def test_progress_ends_where_it_says_it_will() -> None:
    told: list[tuple[int, int]] = []
    with filled(np.random.default_rng(6).standard_normal((2, 200_000))) as buffer:
        column_statistics(buffer, exact=True, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_exact_statistics_of_a_window_that_moves_once_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).standard_normal((1, 3000))
    spec = {"x": diskbuf.ArraySpec([], "float64")}
    options = diskbuf.StoreOptions(chunk_bytes=4096)
    with diskbuf.UniformReplayBuffer(spec, 1, 2000, options=options) as buffer:
        buffer.extend({"x": values[:, :2000]})
        begin = statistics._Column.begin_selecting
        left = [values[:, 2000:]]

        def evict(column: Any) -> None:
            if left:
                buffer.extend({"x": left.pop()})
            begin(column)

        monkeypatch.setattr(statistics._Column, "begin_selecting", evict)
        found = column_statistics(buffer, exact=True, sample_size=10)
    assert (found.first_id, found.next_id) == (1000, 3000)
    check(found.columns[0], values[:, 1000:], is_exact=True)


def test_exact_statistics_of_a_window_that_never_stays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"x": diskbuf.ArraySpec([], "float64")}
    rng = np.random.default_rng(8)
    with diskbuf.UniformReplayBuffer(spec, 1, 2000, options=diskbuf.StoreOptions(chunk_bytes=4096)) as buffer:
        buffer.extend({"x": rng.standard_normal((1, 2000))})
        begin = statistics._Column.begin_selecting

        def evict(column: Any) -> None:
            buffer.extend({"x": rng.standard_normal((1, 1500))})
            begin(column)

        monkeypatch.setattr(statistics._Column, "begin_selecting", evict)
        with pytest.raises(diskbuf.WindowError, match="Leave exact out"):
            column_statistics(buffer, exact=True, sample_size=10)


@pytest.mark.parametrize("exact", [False, True])
def test_memory_does_not_grow_with_the_store(exact: bool) -> None:
    def peak(steps: int) -> int:
        rng = np.random.default_rng(9)
        with filled(rng.standard_normal((4, steps))) as buffer:
            tracemalloc.start()
            column_statistics(buffer, exact=exact)
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return found

    assert peak(2_000_000) < peak(500_000) + 20 * 2**20


# ---- kept beside the store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    values = np.random.default_rng(10).standard_normal((2, 1000)).astype("float32")
    filled(values, tmp_path / "s").close()
    return tmp_path / "s"


def test_saved_statistics_come_back_as_they_were(store: Path) -> None:
    with diskbuf.open(store) as buffer:
        assert saved_statistics(buffer) is None
        found = column_statistics(buffer)
        assert save_statistics(buffer, found)
        again = saved_statistics(buffer, ["x"])
        assert again is not None
        assert again.is_saved
        assert again.columns == found.columns
        assert (again.first_id, again.next_id) == (0, 1000)


def test_new_steps_other_options_and_other_columns_are_not_what_was_saved(store: Path) -> None:
    with diskbuf.open(store, mode="r+") as buffer:
        save_statistics(buffer, column_statistics(buffer))
        assert saved_statistics(buffer, exact=True) is None
        assert saved_statistics(buffer, seed=1) is None
        assert saved_statistics(buffer, ["y"]) is None
        buffer.add_batch({"x": np.zeros(2, "float32")})
        assert saved_statistics(buffer) is None


def test_statistics_of_a_window_that_has_moved_are_not_saved(store: Path) -> None:
    with diskbuf.open(store, mode="r+") as buffer:
        found = column_statistics(buffer)
        buffer.add_batch({"x": np.zeros(2, "float32")})
        assert not save_statistics(buffer, found)
        assert not (store / ".diskbuf" / "statistics.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_file_of_statistics_counts_as_none(store: Path, text: str) -> None:
    with diskbuf.open(store) as buffer:
        save_statistics(buffer, column_statistics(buffer))
        (store / ".diskbuf" / "statistics.json").write_text(text)
        assert saved_statistics(buffer) is None


def test_a_store_with_saved_statistics_is_clean_and_a_copy_goes_without(store: Path, tmp_path: Path) -> None:
    with diskbuf.open(store) as buffer:
        save_statistics(buffer, column_statistics(buffer))
    assert diskbuf.verify(store, values=True).is_clean
    assert diskbuf.repair(store).actions == ()
    for name, options in (("plain", {}), ("packed", {"codec": "zstd"})):
        diskbuf.copy(store, tmp_path / name, **options)
        assert not (tmp_path / name / ".diskbuf" / "statistics.json").exists()
    assert json.loads((store / ".diskbuf" / "statistics.json").read_text())["format"] == 1


def test_statistics_are_not_saved_at_a_url(store: Path) -> None:
    url = f"memory://statistics/{store.parent.name}"
    diskbuf.copy(store, url)
    with diskbuf.open(url, read_options=diskbuf.ReadOptions(cache_dir=":memory:")) as buffer:
        found = column_statistics(buffer)
        with pytest.raises(diskbuf.OptionError, match="beside a store on this machine"):
            save_statistics(buffer, found)
        assert saved_statistics(buffer) is None
