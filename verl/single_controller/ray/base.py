"""Alias module of `verl.single_controller.ray`."""

from verl.single_controller.ray import *  # noqa: F403
from verl.single_controller.ray import __all__ as __all__
