"""Index arithmetic against the naive way: every formula has a loop beside it that nobody could get wrong."""

import itertools
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diskbuf import OptionError, plan
from diskbuf.readers.requests import share_of

LARGEST_DRAW = 1 - 2.0**-53
SEEDS = st.integers(-(2**70), 2**70)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """(first_id, next_id, runs): runs ascend from at most first_id, and may lie before, inside or at the end."""
    first_id = draw(st.integers(0, 30))
    next_id = first_id + draw(st.integers(0, 20))
    runs = draw(st.lists(st.integers(0, next_id), unique=True, max_size=6).map(sorted))
    return first_id, next_id, tuple(runs)


def run_of(step_id: int, runs: tuple[int, ...]) -> int:
    return sum(run <= step_id for run in runs)


def naive_starts(window: tuple[int, int, tuple[int, ...]], num_steps: int) -> list[int]:
    """Each id from which `num_steps` ids are in the window and belong to one run."""
    first_id, next_id, runs = window
    return [
        start
        for start in range(first_id, next_id - num_steps + 1)
        if len({run_of(step_id, runs) for step_id in range(start, start + num_steps)}) == 1
    ]


def uniforms(seed: int, first_batch: int, *, batches: int = 1, count: int) -> np.ndarray:
    """Draws of consecutive batches."""
    return plan.uniforms(seed, np.arange(first_batch, first_batch + batches, dtype=np.uint64), count=count)


def evenly_spread(count: int) -> np.ndarray:
    """One draw for each of `count` equal parts of [0, 1)."""
    return (np.arange(count) + 0.5) / count


@given(windows(), st.integers(1, 8))
def test_as_many_starts_are_counted_as_there_are(window: tuple[int, int, tuple[int, ...]], num_steps: int) -> None:
    first_id, next_id, runs = window
    starts = plan.sequence_starts(first_id, next_id, lanes=1, num_steps=num_steps, runs=runs)
    assert starts.total == len(naive_starts(window, num_steps))


@given(windows(), st.integers(1, 8), st.integers(1, 4))
def test_every_start_of_every_lane_has_an_equal_share_of_the_draws(
    window: tuple[int, int, tuple[int, ...]], num_steps: int, lanes: int
) -> None:
    first_id, next_id, runs = window
    expected = [(start, lane) for start in naive_starts(window, num_steps) for lane in range(lanes)]
    starts = plan.sequence_starts(first_id, next_id, lanes=lanes, num_steps=num_steps, runs=runs)
    rows = starts.draw(evenly_spread(len(expected))) if expected else np.empty(0, int)
    assert [(first_id + row // lanes, row % lanes) for row in rows.tolist()] == expected


@given(windows(), st.integers(1, 8), st.integers(1, 4))
def test_the_smallest_and_the_largest_draw_give_the_first_and_the_last_start(
    window: tuple[int, int, tuple[int, ...]], num_steps: int, lanes: int
) -> None:
    first_id, next_id, runs = window
    expected = naive_starts(window, num_steps)
    starts = plan.sequence_starts(first_id, next_id, lanes=lanes, num_steps=num_steps, runs=runs)
    if expected:
        low, high = starts.draw(np.array([0.0, LARGEST_DRAW])).tolist()
        assert (low, high) == ((expected[0] - first_id) * lanes, (expected[-1] - first_id) * lanes + lanes - 1)


@given(st.integers(1, 2**40), st.integers(1, 2**10))
@example(3, 1)
@example(2**40 - 1, 1)
@example(2**39 + 1, 3)
def test_no_draw_reaches_beyond_the_last_row_whatever_the_count(count: int, lanes: int) -> None:
    row = plan.WindowStarts(count, lanes, None).draw(np.array([LARGEST_DRAW]))
    assert row.tolist() == [count * lanes - 1]


def test_draws_of_a_seed_are_spread_evenly_over_starts_and_lanes() -> None:
    starts = plan.sequence_starts(3, 20, lanes=2, num_steps=3, runs=(0, 8, 9, 14))
    draws = uniforms(11, 0, count=88_000)[0]
    counts = np.unique(starts.draw(draws), return_counts=True)[1]
    assert len(counts) == 2 * starts.total == 2 * len(naive_starts((3, 20, (0, 8, 9, 14)), 3))
    expected = 88_000 / len(counts)
    assert abs(counts - expected).max() < 5 * expected**0.5


@given(windows())
def test_segments_are_the_window_cut_at_each_start_of_a_run(window: tuple[int, int, tuple[int, ...]]) -> None:
    first_id, next_id, runs = window
    groups = itertools.groupby(range(first_id, next_id), key=lambda step_id: run_of(step_id, runs))
    ids = [list(group) for _, group in groups]
    assert plan.segments(first_id, next_id, runs=runs) == [(group[0], group[-1] + 1) for group in ids]


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 20), st.integers(1, 5))
@example([3], 6, 2)
@example([3], 7, 2)
def test_a_sequence_is_every_lanes_th_row_from_its_start(starts: list[int], num_steps: int, lanes: int) -> None:
    rows = plan.sequence_rows(np.array(starts, np.int64), num_steps=num_steps, lanes=lanes)
    assert rows.shape == (len(starts), num_steps)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[start + step * lanes for step in range(num_steps)] for start in starts]


@given(SEEDS, st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 9))
def test_a_block_of_batches_holds_what_each_batch_holds_alone(seed: int, first: int, batches: int, count: int) -> None:
    block = uniforms(seed, first, batches=batches, count=count)
    singles = [uniforms(seed, first + number, count=count)[0] for number in range(batches)]
    np.testing.assert_array_equal(block, singles)


@given(SEEDS, st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 9))
def test_a_longer_batch_begins_like_a_shorter_one(seed: int, batch: int, count: int, more: int) -> None:
    short = uniforms(seed, batch, count=count)[0]
    assert uniforms(seed, batch, count=count + more)[0, :count].tolist() == short.tolist()


def test_draws_do_not_change_from_version_to_version() -> None:
    """Resuming by number needs this: a seed and a batch number mean the same draws for ever."""
    assert (uniforms(7, 5, count=3) * 2**53).astype(int).tolist() == [
        [7542025560869024, 8722596302104412, 4108397787942810]
    ]
    assert plan.derive_seed(7, 1) == 7091162075535606283


@given(SEEDS, st.integers(0, 2**30))
def test_draws_are_at_least_0_and_below_1(seed: int, batch: int) -> None:
    draws = uniforms(seed, batch, batches=2, count=100)
    assert draws.min() >= 0
    assert draws.max() < 1


def test_draws_look_uniform_and_batches_and_seeds_independent() -> None:
    draws = uniforms(0, 0, batches=200, count=200)
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert abs(counts - 800).max() < 5 * 800**0.5
    others = uniforms(1, 0, batches=200, count=200)
    pairs = [(draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:]), (draws, others)]
    assert max(abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) for left, right in pairs) < 5 / 200


@given(SEEDS, st.lists(st.integers(0, 5), min_size=2, max_size=5, unique=True))
def test_streams_of_a_seed_have_seeds_of_their_own(seed: int, streams: list[int]) -> None:
    assert len({plan.derive_seed(seed, stream) for stream in streams}) == len(streams)


def plainly_planned(
    seed: int, batch: int, starts: plan.SequenceStarts, *, lanes: int, count: int, num_steps: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """What a planner plans, from the functions that it is made of, one batch at a time."""
    draws = uniforms(seed, batch, count=count)[0]
    rows = starts.draw(draws)
    if num_steps is not None:
        rows = rows[:, None] + np.arange(num_steps) * lanes
    return rows, rows // lanes


@given(
    st.integers(0, 2**63),
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.integers(0, 100),
            st.sampled_from([1, 2, 3, 700]),
            st.sampled_from([None, 1, 2, 9]),
            st.sampled_from([(0, 9, ()), (3, 50, ()), (3, 50, (20, 33)), (0, 2000, ())]),
            st.integers(1, 40),
        ),
        max_size=6,
    ),
)
def test_a_plan_is_that_of_its_batch_however_it_was_reached(
    seed: int, lanes: int, requests: list[tuple[int, int, int | None, tuple[int, int, tuple[int, ...]], int]]
) -> None:
    planner = plan.RandomPlanner(seed, lanes=lanes)
    for first_batch, count, num_steps, (first_id, next_id, runs), repeats in requests:
        starts = plan.sequence_starts(first_id, next_id, lanes=lanes, num_steps=num_steps or 1, runs=runs)
        for batch in range(first_batch, first_batch + repeats):  # long enough to go through several blocks
            rows, ids = planner.plan(batch, starts, count=count, num_steps=num_steps)
            expected = plainly_planned(seed, batch, starts, lanes=lanes, count=count, num_steps=num_steps)
            np.testing.assert_array_equal(rows, expected[0])
            np.testing.assert_array_equal(ids, expected[1])


def test_threads_that_share_a_planner_get_each_batch_once_and_of_their_own_size() -> None:
    """Samplers of one buffer share its planner; with plans of another thread's size their samples would have it too."""
    planner = plan.RandomPlanner(5, lanes=2)
    starts = plan.WindowStarts(1000, 2, None)
    found: dict[int, list[tuple[int, np.ndarray]]] = {1: [], 2: [], 700: []}

    def draw(count: int) -> None:
        for _ in range(1000):
            batch = planner.next_batch()
            found[count].append((batch, planner.plan(batch, starts, count=count, num_steps=None)[0]))

    threads = [threading.Thread(target=draw, args=(count,)) for count in found]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(batch for drawn in found.values() for batch, _ in drawn) == list(range(3000))
    for count, drawn in found.items():
        for batch, rows in drawn:
            expected = plainly_planned(5, batch, starts, lanes=2, count=count, num_steps=None)[0]
            np.testing.assert_array_equal(rows, expected)


def elements_of(
    window: tuple[int, int, tuple[int, ...]], lanes: int, request: plan.PassRequest
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The elements of a pass, one by one."""
    first_id, next_id, runs = window
    elements = plan.PassPlan(first_id, next_id, lanes=lanes, request=request, runs=runs)
    for number in range(elements.total):
        (ids,), (of_lane,) = elements.block(np.array([number]))
        yield ids, of_lane


def naive_pass(
    window: tuple[int, int, tuple[int, ...]], lanes: int, request: plan.PassRequest
) -> Iterator[list[list[tuple[int, int]]]]:
    """Elements as lists over lanes of lists over steps of (id, lane)."""
    first_id, next_id, runs = window
    size = request.sample_batch_size or 1
    steps = request.num_steps or 1
    shift = steps if request.window_shift is None or request.num_steps is None else request.window_shift
    by_run: dict[int, list[int]] = {}
    for step_id in range(first_id, next_id):
        by_run.setdefault(run_of(step_id, runs), []).append(step_id)
    for low in range(0, lanes, size):
        group = list(range(lanes))[low : low + size]
        if request.drop_remainder and len(group) < size:
            continue
        for ids in by_run.values():
            for start in range(0, len(ids), shift):
                piece = ids[start : start + steps]
                if len(piece) == steps or not request.drop_remainder:
                    yield [[(step_id, lane) for step_id in piece] for lane in group]


@st.composite
def requests(draw: st.DrawFn) -> plan.PassRequest:
    maybe = st.none() | st.integers(1, 6)
    return plan.PassRequest(
        sample_batch_size=draw(maybe),
        num_steps=draw(maybe),
        window_shift=draw(maybe),
        drop_remainder=draw(st.booleans()),
    )


@given(windows(), st.integers(1, 5), requests())
def test_a_pass_is_what_plain_loops_would_make(
    window: tuple[int, int, tuple[int, ...]], lanes: int, request: plan.PassRequest
) -> None:
    found = []
    for ids, of_lane in elements_of(window, lanes, request):
        assert ids.shape == of_lane.shape
        assert ids.ndim == (request.sample_batch_size is not None) + (request.num_steps is not None)
        shape = (
            1 if request.sample_batch_size is None else ids.shape[0],
            1 if request.num_steps is None else ids.shape[-1],
        )
        pairs = zip(ids.reshape(shape).tolist(), of_lane.reshape(shape).tolist(), strict=True)
        found.append([list(zip(*pair, strict=True)) for pair in pairs])
    assert found == list(naive_pass(window, lanes, request))


@given(windows(), st.integers(1, 5), st.none() | st.integers(1, 6), st.none() | st.integers(1, 6))
def test_a_pass_without_shift_visits_every_step_exactly_once(
    window: tuple[int, int, tuple[int, ...]], lanes: int, size: int | None, num_steps: int | None
) -> None:
    first_id, next_id, _ = window
    request = plan.PassRequest(sample_batch_size=size, num_steps=num_steps, window_shift=None, drop_remainder=False)
    visited = [
        pair
        for ids, of_lane in elements_of(window, lanes, request)
        for pair in zip(np.ravel(ids).tolist(), np.ravel(of_lane).tolist(), strict=True)
    ]
    assert sorted(visited) == list(itertools.product(range(first_id, next_id), range(lanes)))


@given(windows(), st.integers(1, 5), requests(), st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_a_pass_in_blocks_and_shards_is_the_pass_element_by_element(
    window: tuple[int, int, tuple[int, ...]],
    lanes: int,
    request: plan.PassRequest,
    most: int,
    shards: int,
    start: int,
) -> None:
    first_id, next_id, runs = window
    singles = [(ids.tolist(), of_lane.tolist()) for ids, of_lane in elements_of(window, lanes, request)]
    elements = plan.PassPlan(first_id, next_id, lanes=lanes, request=request, runs=runs)
    for index in range(shards):
        share = plan.Share(start=start, index=index, shards=shards)
        found: list[tuple[object, object]] = []
        while True:
            numbers = share.numbers(len(found), most).astype(np.int64)
            numbers = numbers[numbers < elements.total]
            if not len(numbers):
                break
            ids, of_lane = elements.block(numbers)
            assert 1 <= len(ids) <= most
            found += zip(ids.tolist(), of_lane.tolist(), strict=True)
        assert found == singles[start * shards + index :: shards]


@given(SEEDS, st.integers(1, 4), st.integers(0, 5), st.integers(1, 40))
def test_shards_draw_the_batches_of_one_reader_between_them(seed: int, shards: int, start: int, batches: int) -> None:
    starts = plan.WindowStarts(50, 3, None)
    alone = plan.RandomPlanner(seed, lanes=3)
    for index in range(shards):
        share = plan.Share(start=start, index=index, shards=shards)
        planner = plan.RandomPlanner(seed, lanes=3, share=share)
        for batch in range(batches):
            rows, _ = planner.plan(batch, starts, count=4, num_steps=2)
            expected, _ = alone.plan((start + batch) * shards + index, starts, count=4, num_steps=2)
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("num_steps", range(1, 7))
@pytest.mark.parametrize("capacity", range(2, 13))
def test_every_sequence_of_a_window_of_any_capacity_holds_consecutive_ids_of_one_lane(
    capacity: int, num_steps: int
) -> None:
    lanes = 2
    for next_id in range(2 * capacity + 2):
        first_id = max(0, next_id - capacity)
        starts = plan.sequence_starts(first_id, next_id, lanes=lanes, num_steps=num_steps)
        assert starts.total == max(0, next_id - first_id - num_steps + 1)
        rows = starts.draw(evenly_spread(starts.pairs))
        sequences = plan.sequence_rows(rows, num_steps=num_steps, lanes=lanes)
        ids, of_lane = first_id + sequences // lanes, sequences % lanes
        assert (np.diff(ids, axis=1) == 1).all()
        assert (of_lane == of_lane[:, :1]).all()
        assert sorted(zip(ids[:, 0].tolist(), of_lane[:, 0].tolist(), strict=True)) == list(
            itertools.product(range(first_id, next_id - num_steps + 1), range(lanes))
        )


@pytest.mark.parametrize(("start", "shard"), [(2**62, None), (2**63, None), (2**61, (1, 4)), (0, (0, 2**70))])
def test_more_batches_than_can_be_counted_are_refused(start: int, shard: tuple[int, int] | None) -> None:
    with pytest.raises(OptionError, match=r"start times the count of shards must be at most 2\*\*62"):
        share_of(start, shard)
    assert share_of(2**60 - 1, (3, 4)).numbers(1, 2).tolist() == [2**62 + 3, 2**62 + 7]
