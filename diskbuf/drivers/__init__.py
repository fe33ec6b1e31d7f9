"""Drivers: what lets a policy act in an environment and hands the rows to observers."""

from diskbuf.drivers.driver import Driver
from diskbuf.drivers.dynamic_episode_driver import DynamicEpisodeDriver
from diskbuf.drivers.dynamic_step_driver import DynamicStepDriver

__all__ = ["Driver", "DynamicEpisodeDriver", "DynamicStepDriver"]
