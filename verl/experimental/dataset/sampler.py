"""Alias of names in `verl.utils.dataset.sampler`."""

from verl.utils.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
