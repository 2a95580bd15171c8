"""Face: `verl.single_controller.ray` under the name users import."""

from verl.single_controller.ray import *  # noqa: F403
from verl.single_controller.ray import __all__ as __all__
