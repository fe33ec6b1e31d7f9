"""What every test gets: quiet TensorFlow, the same random examples each run, and a look for threads left behind."""

import os
import tempfile
import threading
from collections.abc import Iterator

import hypothesis
import pytest

# Read by the libraries when they are imported, so set before any test imports them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("MPLBACKEND", "Agg")

# Chunks that tests leave in the cache must not be found by the next run, nor fill the user's own.
_CACHE = tempfile.TemporaryDirectory(prefix="diskbuf-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# A deadline per example measures the machine; the same examples each run make a failure the change's own.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# HYPOTHESIS_PROFILE=search looks for new counterexamples.
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Pools that zarr and asyncio keep for the life of the process.
SHARED_POOLS = ("zarr", "asyncio")


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fails a test that leaves a thread of ours, or one that would keep the process alive."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        ours = thread.name.startswith("diskbuf")
        if ours or not (thread.daemon or thread.name.startswith(SHARED_POOLS)):
            thread.join(timeout=5)
            assert not thread.is_alive(), f"the test left the thread {thread.name!r} running"
