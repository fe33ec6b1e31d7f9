"""The background thread of a store that is open for writing. Holds no store alive: a forgotten buffer ends it."""

import contextlib
import queue
import threading
import time
import weakref
from typing import Protocol


class Kept(Protocol):
    """What the keeper looks after."""

    def tend(self, *, is_sync_due: bool) -> None:
        """Does what waits in the background; errors are the store's to keep and raise."""


COMMIT_SECONDS = 0.25
"""Least time between two commits of zarr metadata that chunk rolls ask for; they only serve other zarr readers."""


class Keeper:
    """Calls `tend` when asked to and every `sync_seconds`.

    Args:
        kept: The store; only weakly held.
        sync_seconds: Seconds between two syncs, None for no timer.
        name: The thread's.
    """

    def __init__(self, kept: Kept, *, sync_seconds: float | None, name: str = "diskbuf-keeper") -> None:
        # A SimpleQueue, because its put may be called anywhere: the callback runs where garbage is collected, maybe in
        # this very thread while it waits, and an Event would wait for its own lock there.
        self._wishes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._kept = weakref.ref(kept, lambda _: self._wishes.put(None))
        self._sync_seconds = sync_seconds
        self._is_stopping = False
        self._thread = threading.Thread(target=_keep, args=(self._kept, self), name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Asks for a `tend` soon."""
        self._wishes.put(None)

    def stop(self) -> None:
        """Ends the thread and waits for what it is doing."""
        self._is_stopping = True
        self._wishes.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self, due: float | None) -> bool:
        """Waits until asked or due; returns whether to stop."""
        with contextlib.suppress(queue.Empty):
            self._wishes.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            while True:  # one `tend` grants them all
                self._wishes.get_nowait()
        return self._is_stopping


def _keep(kept: "weakref.ref[Kept]", keeper: Keeper) -> None:
    seconds = keeper._sync_seconds
    due = None if seconds is None else time.monotonic() + seconds
    while not keeper.wait(due):
        store = kept()
        if store is None:
            return
        is_due = due is not None and time.monotonic() >= due
        store.tend(is_sync_due=is_due)
        if is_due and seconds is not None:
            due = time.monotonic() + seconds
        del store
