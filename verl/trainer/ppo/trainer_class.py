"""A trainer of the user's own: `trainer.cls_path`, or `trainer_cls` of a TaskRunner."""

from __future__ import annotations

from typing import Any

from verl.utils.import_utils import load_user_object

KEY = "trainer.cls_path"


def load_trainer_class(cls_path: str) -> Any:
    """The class that `file.py:Class`, `a.b.c:Class` or `a.b.c.Class` names; it must be a RayPPOTrainer."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    path, _, name = cls_path.rpartition(":" if ":" in cls_path.removeprefix("pkg://") else ".")
    if not path or not name:
        raise ValueError(f"{KEY}: {cls_path!r} names no class. Write file.py:Class or package.module.Class.")
    found: Any = load_user_object(path, name, key=KEY)
    if not isinstance(found, type) or not issubclass(found, RayPPOTrainer):
        raise ValueError(
            f"{KEY}: {name} in {path} is no RayPPOTrainer. Derive it from verl.trainer.ppo.ray_trainer.RayPPOTrainer."
        )
    return found
