"""Metrics as lines of a log."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from diskbuf.errors import OptionError
from diskbuf.metrics.metric import Metric
from diskbuf.tree import Structure

_LOGGER = logging.getLogger("diskbuf.metrics")


def export_metrics(step: int, metrics: Iterable[Metric], loss_info: Any = None) -> None:
    """Logs a line `[step=N] NAME = VALUE.` for each metric and for the loss, at INFO, to the logger `diskbuf.metrics`.

    Python shows such lines once a program says so: `logging.basicConfig(level=logging.INFO)`.

    Args:
        step: N.
        metrics: What to log, in that order.
        loss_info: What an agent's `train` returns, with an attribute `loss`; None leaves that line out.

    Raises:
        OptionError: If loss_info has no loss; nothing was logged.
    """
    if loss_info is not None and not hasattr(loss_info, "loss"):
        raise OptionError(f"loss_info must have an attribute loss, got {loss_info!r}. Pass what train() returned.")
    for metric in metrics:
        _LOGGER.info("[step=%s] %s = %s.", step, metric.name, _text(metric.result()))
    if loss_info is not None:
        _LOGGER.info("[step=%s] loss = %s.", step, _text(loss_info.loss))


def _text(value: Any) -> str:
    structure = Structure(value)
    texts = [str(np.asarray(leaf)).replace("\n", "") for leaf in structure.flatten(value)]
    if structure.num_leaves == 1 and not structure.keys[0]:
        return texts[0]
    return "{" + ", ".join(f"{path}: {text}" for path, text in zip(structure.paths, texts, strict=True)) + "}"
