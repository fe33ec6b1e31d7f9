"""Reading by NumPy alone, as `get_next` and `as_numpy_iterator` do, beside bare `numpy.take` calls."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import small_steps
from measure import MICROSECONDS, Record, Target, against, interleave, seconds_per_call

import diskbuf

SEQUENCES, NUM_STEPS = small_steps.SEQUENCES, small_steps.NUM_STEPS
_SPEC = {**small_steps.SPEC, "is_last": diskbuf.ArraySpec([], "bool")}
_EPISODE = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        ring: Ids in the ring.
        batches: Batches in a round.
        rounds: Rounds of these.
    """

    ring: int = 20_000
    batches: int = 20
    rounds: int = 200


QUICK = Size(ring=200, batches=2, rounds=2)


def measure_numpy(folder: Path, size: Size) -> list[Record]:
    """Each way to sample arrays, from a full ring of small steps."""
    rng = np.random.default_rng(0)
    lanes = small_steps.LANES
    rows = {name: rng.random((lanes, size.ring, *spec.shape)).astype(spec.dtype) for name, spec in _SPEC.items()}
    rows["is_last"] = np.broadcast_to(np.arange(size.ring) % _EPISODE == _EPISODE - 1, (lanes, size.ring))
    arrays = [leaf.reshape(lanes * size.ring, *leaf.shape[2:]) for leaf in rows.values()]
    with diskbuf.UniformReplayBuffer(_SPEC, lanes, size.ring, path=folder / "steps.zarr", seed=0) as live:
        live.extend(rows)
        with diskbuf.open(live.path) as closed:
            get_next = functools.partial(live.get_next, SEQUENCES, NUM_STEPS)
            calls: dict[str, Callable[[], object]] = {
                "get_next": get_next,
                "get_next, within episodes": functools.partial(get_next, within_episodes="is_last"),
                "as_numpy_iterator, live": functools.partial(next, live.as_numpy_iterator(SEQUENCES, NUM_STEPS)),
                "as_numpy_iterator, closed": functools.partial(next, closed.as_numpy_iterator(SEQUENCES, NUM_STEPS)),
                "as_numpy_iterator, within episodes": functools.partial(
                    next, closed.as_numpy_iterator(SEQUENCES, NUM_STEPS, within_episodes="is_last")
                ),
                "bare": _Takes(arrays, size.ring),
            }
            for call in calls.values():
                call()  # what is indexed once is not what is measured
            figures = interleave(
                {name: functools.partial(_microseconds, call, size.batches) for name, call in calls.items()},
                rounds=size.rounds,
            )
    bare = figures.pop("bare")
    return [
        against(
            f"numpy_{name.replace(', ', '_').replace(' ', '_')}",
            f"{name}, {SEQUENCES} x {NUM_STEPS}",
            ours=found,
            peer=f"{len(arrays)} numpy.take from memory",
            peer_figures=bare,
            unit=MICROSECONDS,
            target=Target(at_most=1.6) if name == "get_next" else None,
        )
        for name, found in figures.items()
    ]


class _Takes:
    """Takes random sequences out of arrays in memory; which ones is known beforehand."""

    def __init__(self, arrays: list[np.ndarray], ring: int) -> None:
        starts = np.random.default_rng(0).integers(0, (ring - NUM_STEPS + 1) * small_steps.LANES, (64, SEQUENCES))
        self._arrays = arrays
        self._indices = list(starts[..., None] + np.arange(NUM_STEPS) * small_steps.LANES)
        self._at = 0

    def __call__(self) -> list[np.ndarray]:
        index = self._indices[self._at % len(self._indices)]
        self._at += 1
        return [np.take(array, index, axis=0) for array in self._arrays]


def _microseconds(call: Callable[[], object], calls: int) -> float:
    return seconds_per_call(call, calls=calls) * 1e6
