"""ResourcePoolManager: which role runs on which pool of devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from verl.single_controller.ray.resource_pool import RayResourcePool


@dataclass
class ResourcePoolManager:
    """Pools by name (`{"global_pool": [8, 8]}`: processes per node) and the pool of every role."""

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[Hashable, str]
    use_gpu: bool = True
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make a pool for every name that a role uses; starting a group in it reserves its devices."""
        used = set(self.mapping.values())
        for name, processes in self.resource_pool_spec.items():
            if name in used and name not in self.resource_pool_dict:
                self.resource_pool_dict[name] = RayResourcePool(processes, self.use_gpu, name_prefix=name)

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices (or processes, without GPUs) of all pools."""
        return sum(sum(processes) for processes in self.resource_pool_spec.values())

    def release(self) -> None:
        """Give all pools back."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict.clear()
