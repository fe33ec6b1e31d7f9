"""How far batches from a moving set of blocks are from exact uniform sampling, by the share of blocks that is at hand.

    python tools/bench/shuffles.py

Nothing is read or timed: only the plans are looked at. Beside each figure stands what it should be, where there is a
formula (N blocks, of which R are resident, and batches of K rows):

- same block: how often two rows of a batch are from one block, 1 / R; exact sampling has 1 / N.
- mean of ids: the variance of a batch's mean of a value that trends through the store (the id), over that of exact
  sampling: 1 + (K - 1) (N - R) / (R (N - 1)), for a set that is a simple random sample of the blocks (Cochran,
  "Sampling Techniques", 1977, on cluster samples). It shows how much a batch knows of the place it is from. A set of
  more than half of the blocks goes through nearly the same states each epoch, so that this differs from seed to seed.
- draws an epoch: the variance of how often a row is drawn in as many draws as there are rows, over the mean, which is
  1. Exact sampling has 1, as the Poisson distribution has, and so has a whole stay of a block. Stays across an end of
  the epoch are cut, by a part that is uniform in [0, 1/2] for R of N blocks, and as much of other stays is let in: that
  adds r / 6 - 3 r^2 / 32 with r = R / N, were orders of different epochs independent. They aren't quite, as blocks are
  held back.
- gaps: epochs between two draws of one row, the longest of one in a thousand, and the longest of all. Exact sampling
  has ln 1000 = 6.9 and, over all draws D, about ln D.
"""

import argparse
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from diskbuf.plan import RandomPlanner, sequence_starts
from diskbuf.resident_plan import ResidentPlanner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is looked at.

    Attributes:
        blocks: Blocks N of the store.
        block_rows: Rows in each.
        count: Rows K of a batch.
        epochs: Epochs that are drawn with each seed.
        seeds: How many seeds; figures are their means, but for the longest gap.
        resident: Resident blocks R, a line of the table each.
    """

    blocks: int = 400
    block_rows: int = 128
    count: int = 256
    epochs: int = 25
    seeds: int = 4
    resident: tuple[int, ...] = (4, 8, 20, 40, 80, 120, 200, 280, 360, 399)

    @property
    def rows(self) -> int:
        """Rows of the store."""
        return self.blocks * self.block_rows


QUICK = Size(blocks=40, block_rows=16, count=16, epochs=6, seeds=2, resident=(4, 20, 30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffle:
    """What the batches of a plan look like.

    Attributes:
        same_block: How often two rows of a batch are from one block.
        variance_of_mean: Variance of a batch's mean id, in ids squared.
        variance_of_draws: Variance over the mean of how often a row is drawn in an epoch.
        gap: Epochs between two draws of one row, the 0.999 quantile.
        longest_gap: The longest of all.
    """

    same_block: float
    variance_of_mean: float
    variance_of_draws: float
    gap: float
    longest_gap: float


def drawn(size: Size, resident: int | None, *, seed: int) -> NDArray[np.int64]:
    """The rows of all batches, [batches, K], from the second epoch on; None for exact sampling."""
    window = (0, size.rows)
    batches = range(size.rows // size.count, (size.epochs + 1) * size.rows // size.count)
    if resident is None:
        exact, starts = RandomPlanner(seed, lanes=1), sequence_starts(*window, lanes=1, num_steps=1)
        return np.stack([exact.plan(batch, starts, count=size.count, num_steps=None)[0] for batch in batches])
    planner = ResidentPlanner(seed, lanes=1, block_ids=size.block_rows, resident_blocks=resident)
    return np.stack([planner.plan(batch, window, count=size.count, num_steps=None)[0] for batch in batches])


def look_at(rows: NDArray[np.int64], size: Size) -> Shuffle:
    """Measures the batches [batches, K] of a plan."""
    blocks = rows // size.block_rows
    per_block = np.zeros((len(rows), size.blocks), np.int64)
    np.add.at(per_block, (np.arange(len(rows))[:, None], blocks), 1)
    pairs = (per_block * (per_block - 1)).sum(1) / (size.count * (size.count - 1))
    flat = rows.ravel()
    an_epoch = flat[: len(flat) // size.rows * size.rows].reshape(-1, size.rows)
    draws = np.stack([np.bincount(epoch, minlength=size.rows) for epoch in an_epoch])
    by_row = np.argsort(flat, kind="stable")
    gaps = np.diff(by_row)[np.diff(flat[by_row]) == 0] / size.rows
    return Shuffle(
        same_block=float(pairs.mean()),
        variance_of_mean=float(np.mean((rows.mean(1) - (size.rows - 1) / 2) ** 2)),
        variance_of_draws=float(draws.var(1).mean() / draws.mean()),
        gap=float(np.quantile(gaps, 0.999)),
        longest_gap=float(gaps.max()),
    )


def mean_of(shuffles: list[Shuffle]) -> Shuffle:
    """The means over seeds, and the longest gap of all."""
    means = {
        field.name: float(np.mean([getattr(one, field.name) for one in shuffles]))
        for field in dataclasses.fields(Shuffle)
    }
    return Shuffle(**(means | {"longest_gap": max(one.longest_gap for one in shuffles)}))


def table(size: Size) -> list[str]:
    """Draws all epochs for each number of resident blocks; the lines of a Markdown table."""
    every, count = size.blocks, size.count
    exact_variance = (size.rows**2 - 1) / 12 / count
    lines = [
        "| R | R / N | same block | 1 / R | mean of ids | formula | draws an epoch | formula | gap 99.9 % | longest |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for resident in (*size.resident, None):
        shuffle = mean_of([look_at(drawn(size, resident, seed=seed), size) for seed in range(size.seeds)])
        most = every if resident is None else resident
        share = most / every
        of_mean = 1 + (count - 1) * (every - most) / (most * (every - 1))
        # In a set of more than half, blocks come in nearly the same order each epoch: what is let in is what was cut.
        of_draws = f"{1 + share / 6 - 3 * share**2 / 32:.3f}" if share <= 0.5 else "" if resident else "1.000"
        cells = (
            "exact" if resident is None else str(resident),
            f"{share:.3f}",
            f"{shuffle.same_block:.4f}",
            f"{1 / most:.4f}",
            f"{shuffle.variance_of_mean / exact_variance:.2f}",
            f"{of_mean:.2f}",
            f"{shuffle.variance_of_draws:.3f}",
            of_draws,
            f"{shuffle.gap:.1f}",
            f"{shuffle.longest_gap:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small store, to see that it runs")
    size = QUICK if parser.parse_args().quick else Size()
    draws = size.rows * size.epochs * size.seeds
    print(
        f"{size.blocks} blocks (N) of {size.block_rows} rows, batches of {size.count} (K), "
        f"{size.epochs} epochs with each of {size.seeds} seeds; ln of all draws is {math.log(draws):.1f}"
    )
    print(*table(size), sep="\n")


if __name__ == "__main__":
    main()
