"""Alias of names in `verl.utils.dataset.rl_dataset`."""

from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
