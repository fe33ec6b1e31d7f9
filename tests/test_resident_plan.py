"""The moving set of blocks against a simulation that walks through it entry by entry."""

import fractions
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diskbuf import OptionError, plan
from diskbuf.resident_plan import ResidentPlanner, _held_back

Window = tuple[int, int]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Window, tuple[int, ...], dict[str, int | None], int | None]:
    """A window, its runs, a planner's numbers and num_steps."""
    first_id = draw(st.integers(0, 40))
    next_id = first_id + draw(st.integers(0, 60))
    runs = draw(st.lists(st.integers(0, next_id), unique=True, max_size=5).map(sorted))
    most = draw(st.integers(1, 12))
    numbers = {
        "lanes": draw(st.integers(1, 3)),
        "block_ids": draw(st.sampled_from([1, 2, 4, 5, 8])),
        "resident_blocks": most,
        "first_blocks": draw(st.none() | st.integers(1, most)),
    }
    return (first_id, next_id), tuple(runs), numbers, draw(st.none() | st.integers(1, 5))


def sequences(window: Window, runs: tuple[int, ...], block_ids: int, num_steps: int | None) -> dict[int, list[int]]:
    """By block, the ids from which as many steps as are asked for lie in the window, one run and one block."""
    found: dict[int, list[int]] = {}
    for start in range(*window):
        ids = range(start, start + (num_steps or 1))
        places = {(sum(run <= step_id for run in runs), step_id // block_ids) for step_id in ids}
        if ids[-1] < window[1] and len(places) == 1:
            found.setdefault(start // block_ids, []).append(start)
    return found


def entering(
    seed: int, numbers: dict[str, int | None], window: Window, runs: tuple[int, ...], num_steps: int | None
) -> list[int]:
    """The blocks of the first four epochs as they enter: the one that is there first, if it is one, and the next."""
    planner = ResidentPlanner(seed, **(numbers | {"first_blocks": 1}))
    size = len(sequences(window, runs, planner.block_ids, num_steps))
    request = {"count": 1, "num_steps": num_steps}
    (first,) = planner.blocks(0, window, runs, **request).tolist()
    return [first, *planner.upcoming(0, window, runs, **request, most=4 * size - 1).tolist()]


def simulated(
    entries: list[int], pairs: dict[int, int], *, most: int, first: int
) -> Iterator[tuple[list[int], fractions.Fraction]]:
    """The set after each entry, and after how many draws the next one comes."""
    draws = fractions.Fraction(0)
    for number in range(first, len(entries) + 1):
        resident = entries[max(0, number - most) : number]
        draws += fractions.Fraction(sum(pairs[block] for block in resident), most)
        yield sorted(resident), draws


@given(cases(), st.integers(0, 2**40), st.integers(1, 9))
@example(((0, 64), (), {"lanes": 2, "block_ids": 4, "resident_blocks": 4, "first_blocks": 1}, 2), 7, 3)
@example(((0, 64), (), {"lanes": 1, "block_ids": 4, "resident_blocks": 15, "first_blocks": None}, 2), 7, 3)
@example(((3, 61), (9, 30), {"lanes": 1, "block_ids": 4, "resident_blocks": 7, "first_blocks": 7}, 3), 5, 40)
def test_the_set_moves_as_a_walk_through_its_entries_says(
    case: tuple[Window, tuple[int, ...], dict[str, int], int | None], seed: int, count: int
) -> None:
    window, runs, numbers, num_steps = case
    planner = ResidentPlanner(seed, **numbers)
    lanes, most = numbers["lanes"], numbers["resident_blocks"]
    starts = sequences(window, runs, planner.block_ids, num_steps)
    pairs = {block: len(ids) * lanes for block, ids in starts.items()}
    assert planner.pairs(window, runs, num_steps=num_steps) == sum(pairs.values())
    request = {"count": count, "num_steps": num_steps}
    if len(starts) <= most:
        assert planner.blocks(5, window, runs, **request).tolist() == sorted(starts)
        assert planner.upcoming(5, window, runs, **request, most=3).tolist() == []
        return
    walk = simulated(entering(seed, numbers, window, runs, num_steps), pairs, most=most, first=planner.first_blocks)
    resident, until = next(walk)
    for batch in itertools.count():
        while batch * count >= until:
            following = next(walk, None)
            if following is None:
                return
            resident, until = following
        fresh = planner if batch % 3 else ResidentPlanner(seed, **numbers)
        assert fresh.blocks(batch, window, runs, **request).tolist() == resident
        ids = [step_id for block in resident for step_id in starts[block]]
        expected = [((step_id - window[0]) * lanes + lane) for step_id in ids for lane in range(lanes)]
        found = planner.starts(batch, window, runs, **request)
        assert found.draw((np.arange(found.pairs) + 0.5) / found.pairs).tolist() == expected


@given(st.integers(2, 40), st.data(), st.integers(0, 2**40))
def test_each_block_enters_once_an_epoch_and_never_while_it_is_there(size: int, data: st.DataObject, seed: int) -> None:
    most = data.draw(st.integers(1, size - 1))
    numbers = {"lanes": 1, "block_ids": 2, "resident_blocks": most}
    entries = entering(seed, numbers, (0, 2 * size), (), 1)
    epochs = [entries[number * size : (number + 1) * size] for number in range(4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 4
    for at in range(len(entries)):
        recent = entries[max(0, at + 1 - most) : at + 1]
        assert len(set(recent)) == len(recent)


def test_epochs_and_seeds_have_orders_of_their_own_in_which_every_block_comes_anywhere() -> None:
    size, most = 12, 4
    places = np.zeros((size, size), int)
    orders = set()
    for seed in range(400):
        entries = entering(seed, {"lanes": 1, "block_ids": 1, "resident_blocks": most}, (0, size), (), 1)
        for epoch in (0, 2):
            order = entries[epoch * size : (epoch + 1) * size]
            orders.add(tuple(order))
            places[order, range(size)] += 1
    assert len(orders) == 800
    assert ((places - 800 / size) ** 2 / (800 / size)).sum() < 190  # chi-square of 121 degrees: 1 in 20,000


def test_a_large_set_has_another_order_each_epoch_too() -> None:
    entries = entering(3, {"lanes": 1, "block_ids": 1, "resident_blocks": 15}, (0, 24), (), 1)
    assert len({tuple(entries[epoch * 24 : (epoch + 1) * 24]) for epoch in range(4)}) == 4


@given(st.permutations(range(9)), st.permutations(range(12)))
def test_a_block_that_is_still_there_waits_and_the_others_keep_their_order(order: list[int], others: list[int]) -> None:
    entering_blocks, leaving = np.array(others[:9]), np.array(order)
    held = _held_back(entering_blocks, leaving).tolist()
    assert sorted(held) == sorted(entering_blocks.tolist())
    for place, block in enumerate(held):
        assert block not in order or place >= order.index(block)
    free = [block for block in others[:9] if block not in order]
    assert [block for block in held if block not in order] == free


@pytest.mark.parametrize("most", [2, 5, 9])
def test_each_sequence_is_drawn_once_on_average_in_each_stay_of_its_block(most: int) -> None:
    """Whatever the blocks' sizes: a stay is worth one over the sequences to draw from, summed over its draws."""
    window, runs, lanes = (3, 61), (9, 30), 8
    pairs = {block: len(ids) * lanes for block, ids in sequences(window, runs, 4, 2).items()}
    planner = ResidentPlanner(3, lanes=lanes, block_ids=4, resident_blocks=most, first_blocks=1)
    assert len(set(pairs.values())) > 1
    worth: dict[int, float] = {}
    stays = []
    for batch in range(6 * sum(pairs.values())):
        resident = planner.blocks(batch, window, runs, count=1, num_steps=2).tolist()
        stays += [worth.pop(block) for block in list(worth) if block not in resident]
        share = 1 / sum(pairs[block] for block in resident)
        worth |= {block: worth.get(block, 0) + share for block in resident}
    assert len(stays) > 3 * len(pairs)
    # A step ends with a whole draw; and a block may come back at the moment it leaves.
    assert all(abs(stay - max(1, round(stay))) < 0.1 for stay in stays)
    assert sum(stay > 1.5 for stay in stays) < len(stays) / 4


def test_draws_are_uniform_over_all_sequences_of_the_set() -> None:
    window, runs = (3, 61), (9, 30)
    planner = ResidentPlanner(1, lanes=2, block_ids=8, resident_blocks=4, first_blocks=4)
    starts = planner.starts(0, window, runs, count=1000, num_steps=3)
    draws = np.concatenate(
        [planner.random.plan(batch, starts, count=1000, num_steps=3)[0][:, 0] for batch in range(50)]
    )
    rows, counts = np.unique(draws, return_counts=True)
    by_block = sequences(window, runs, 8, 3)
    resident = planner.blocks(0, window, runs, count=1000, num_steps=3).tolist()
    assert rows.tolist() == [
        (step_id - 3) * 2 + lane for block in resident for step_id in by_block[block] for lane in range(2)
    ]
    expected = 50_000 / len(rows)
    degrees = len(rows) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 4 * (2 * degrees) ** 0.5


def test_over_epochs_all_sequences_are_drawn_alike() -> None:
    window, runs = (3, 130), (9, 30)
    planner = ResidentPlanner(7, lanes=2, block_ids=8, resident_blocks=4, first_blocks=1)
    pairs = planner.pairs(window, runs, num_steps=2)
    counts = np.zeros(2 * (window[1] - window[0]), int)
    epochs, size = 300, 6
    for batch in range(epochs * pairs // size):
        rows, _ = planner.plan(batch, window, runs, count=size, num_steps=2)
        np.add.at(counts, rows[:, 0], 1)
    drawn = [
        (step_id - 3) * 2 + lane for ids in sequences(window, runs, 8, 2).values() for step_id in ids for lane in (0, 1)
    ]
    assert counts.sum() == counts[drawn].sum()
    assert len(drawn) == pairs
    assert ((counts[drawn] - epochs) ** 2 / epochs).sum() < pairs + 4 * (2 * pairs) ** 0.5


@given(cases(), st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 2**40))
def test_a_batch_holds_sequences_of_its_blocks(
    case: tuple[Window, tuple[int, ...], dict[str, int], int | None], seed: int, count: int, batch: int
) -> None:
    window, runs, numbers, num_steps = case
    planner = ResidentPlanner(seed, **numbers)
    starts = sequences(window, runs, planner.block_ids, num_steps)
    request = {"count": count, "num_steps": num_steps}
    if not starts:
        assert not len(planner.blocks(batch, window, runs, **request))
        assert not planner.starts(batch, window, runs, **request).pairs
        return
    rows, ids = planner.plan(batch, window, runs, **request)
    shape = (count,) if num_steps is None else (count, num_steps)
    assert rows.shape == ids.shape == shape
    assert ids.tolist() == (rows // planner.lanes).tolist()
    resident = planner.blocks(batch, window, runs, **request).tolist()
    for sequence in rows.reshape(count, -1):
        start = window[0] + sequence[0] // planner.lanes
        assert start // planner.block_ids in resident
        assert start in starts[start // planner.block_ids]
        assert np.diff(sequence).tolist() == [planner.lanes] * (len(sequence) - 1)


@given(st.integers(0, 2**40), st.integers(1, 3), st.integers(0, 30), st.integers(1, 50), st.integers(1, 9))
def test_where_all_blocks_fit_single_steps_are_those_of_exact_sampling(
    seed: int, lanes: int, first_id: int, length: int, count: int
) -> None:
    window = (first_id, first_id + length)
    planner = ResidentPlanner(seed, lanes=lanes, block_ids=4, resident_blocks=14)
    exact = plan.RandomPlanner(seed, lanes=lanes)
    starts = plan.sequence_starts(*window, lanes=lanes, num_steps=1)
    for batch in range(5):
        found = planner.plan(batch, window, count=count, num_steps=None)
        expected = exact.plan(batch, starts, count=count, num_steps=None)
        np.testing.assert_array_equal(found, expected)


@given(st.integers(0, 2**40), st.integers(1, 4), st.integers(0, 9), st.integers(0, 2**50))
def test_shards_and_resumed_readers_plan_the_batches_of_one_reader(
    seed: int, shards: int, start: int, far: int
) -> None:
    numbers = {"lanes": 2, "block_ids": 4, "resident_blocks": 3}
    window, runs = (5, 70), (20,)
    alone = ResidentPlanner(seed, **numbers)
    for base, index in itertools.product((0, far), range(shards)):
        share = plan.Share(start=start + base, index=index, shards=shards)
        planner = ResidentPlanner(seed, **numbers, share=share)
        for batch in range(4):
            number = (start + base + batch) * shards + index
            found = planner.plan(batch, window, runs, count=5, num_steps=2)
            expected = alone.plan(number, window, runs, count=5, num_steps=2)
            np.testing.assert_array_equal(found, expected)


def test_plans_do_not_change_from_version_to_version() -> None:
    planner = ResidentPlanner(7, lanes=2, block_ids=8, resident_blocks=4)
    assert planner.blocks(1000, (3, 130), (9, 30), count=4, num_steps=2).tolist() == [7, 8, 13, 14]
    assert planner.plan(1000, (3, 130), (9, 30), count=4, num_steps=None)[0].tolist() == [20, 91, 102, 189]
    wide = ResidentPlanner(7, lanes=2, block_ids=8, resident_blocks=12)
    assert wide.upcoming(1000, (3, 130), (9, 30), count=4, num_steps=2, most=4).tolist() == [11, 2, 6, 12]


def test_the_set_begins_small_and_is_full_once_half_of_its_rows_were_drawn() -> None:
    most, block_ids, lanes, count = 64, 32, 4, 256
    planner = ResidentPlanner(1, lanes=lanes, block_ids=block_ids, resident_blocks=most)
    window = (0, 1000 * block_ids)
    sizes = [len(planner.blocks(batch, window, count=count, num_steps=None)) for batch in range(40)]
    assert sizes[0] == 8
    assert sizes == sorted(sizes)
    half = most * block_ids * lanes // 2 // count
    assert sizes[half - 2] < most == sizes[half + 1]
    full = ResidentPlanner(1, lanes=lanes, block_ids=block_ids, resident_blocks=most, first_blocks=most)
    assert len(full.blocks(0, window, count=count, num_steps=None)) == most


def test_threads_may_share_a_planner() -> None:
    numbers = {"lanes": 2, "block_ids": 4, "resident_blocks": 3}
    shared, alone = ResidentPlanner(5, **numbers), ResidentPlanner(5, **numbers)
    windows = [(0, 60), (3, 64), (0, 9)]
    found: list[tuple[int, Window, np.ndarray]] = []

    def draw(window: Window) -> None:
        for _ in range(300):
            batch = shared.next_batch()
            found.append((batch, window, shared.plan(batch, window, count=7, num_steps=2)[0]))

    threads = [threading.Thread(target=draw, args=(window,)) for window in windows]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(batch for batch, _, _ in found) == list(range(900))
    for batch, window, rows in found:
        np.testing.assert_array_equal(rows, alone.plan(batch, window, count=7, num_steps=2)[0])


@pytest.mark.parametrize("name", ["block_ids", "resident_blocks", "first_blocks"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_numbers_are_ints_of_at_least_1(name: str, value: int) -> None:
    numbers = {"block_ids": 4, "resident_blocks": 4, name: value}
    with pytest.raises(OptionError, match=f"{name} must be an int of at least 1, got {value}"):
        ResidentPlanner(0, lanes=1, **numbers)


def test_no_more_blocks_are_there_at_first_than_may_be_resident() -> None:
    with pytest.raises(OptionError, match="first_blocks must be at most the 4 resident_blocks, got 5"):
        ResidentPlanner(0, lanes=1, block_ids=4, resident_blocks=4, first_blocks=5)


def test_the_table_of_shuffles_agrees_with_its_formulas() -> None:
    script = Path(__file__).parents[1] / "tools" / "bench" / "shuffles.py"
    run = subprocess.run([sys.executable, str(script), "--quick"], check=True, capture_output=True, text=True)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in run.stdout.splitlines()[3:]]
    assert [line[0] for line in lines] == ["4", "20", "30", "exact"]
    for line in lines:
        assert float(line[2]) == pytest.approx(float(line[3]), rel=0.05)
        assert float(line[4]) == pytest.approx(float(line[5]), rel=0.15)
        assert float(line[6]) == pytest.approx(float(line[7] or 1), abs=0.05)
