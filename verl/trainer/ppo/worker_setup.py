"""From roles to running groups: one process per device of a pool, all roles of the pool in it."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls
from verl.trainer.ppo.utils import Role

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

# The policy last: its rollout engine takes what memory the others leave.
_LOAD_ORDER = (
    Role.Critic,
    Role.RefPolicy,
    Role.RewardModel,
    Role.Actor,
    Role.Rollout,
    Role.ActorRollout,
    Role.ActorRolloutRef,
)
# What users know the parts of the hybrid roles as.
_NAMES = {Role.ActorRollout: ("Actor", "Rollout"), Role.ActorRolloutRef: ("Actor", "Rollout", "RefPolicy")}


def start_groups(trainer: RayPPOTrainer) -> dict[Role, Any]:
    """Start and load the groups of all registered roles."""
    manager = trainer.resource_pool_manager
    manager.create_resource_pool()
    # All pools first: more than the cluster has is one error, before anything is loaded.
    trainer.ray_worker_group_cls.reserve(list(manager.resource_pool_dict.values()))
    by_pool: dict[str, dict[Role, RayClassWithInitArgs]] = {}
    for role, cls in trainer.role_worker_mapping.items():
        prepared = _class_of(trainer, role, cls)
        prepared.imports = list(trainer.config.external_libs)
        by_pool.setdefault(manager.mapping[role], {})[role] = prepared
    groups: dict[Role, Any] = {}
    for pool, classes in by_pool.items():
        for name in [name for role in classes for name in _NAMES.get(role, (role.name,))]:
            logger.info("Creating %s worker pool...", name)
        shared = create_colocated_worker_cls({str(role): cls for role, cls in classes.items()})
        started = trainer.ray_worker_group_cls(
            resource_pool=manager.resource_pool_dict[pool], ray_cls_with_init=shared, device_name=trainer.device_name
        )
        views = started.spawn([str(role) for role in classes])
        groups |= {role: views[str(role)] for role in classes}
    for role in _LOAD_ORDER:
        if role in groups:
            groups[role].init_model()
    if Role.Rollout in groups:
        connect_split_rollout(groups[Role.Actor], groups[Role.Rollout])
    return groups


def _class_of(trainer: RayPPOTrainer, role: Role, cls: type) -> RayClassWithInitArgs:
    config = trainer.config
    if role is Role.Critic:
        return RayClassWithInitArgs(cls, config=config.critic)
    if role is Role.RewardModel:
        reward = copy.deepcopy(config.reward_model)
        if reward.model.input_tokenizer is None:
            reward.model.input_tokenizer = config.actor_rollout_ref.model.path
        return RayClassWithInitArgs(cls, config=reward)
    return RayClassWithInitArgs(cls, config=config.actor_rollout_ref, role=str(role))


def connect_split_rollout(actor: Any, rollout: Any) -> None:
    """Let trainers and engines of different processes join one group for weights: both are called at once."""
    address = actor.transfer_address()[0]
    receivers = rollout.world_size
    joining = [group.join_transfer(address, receivers) for group in (actor, rollout)]
    for future in joining:
        future.get()


def hand_over_weights(trainer: RayPPOTrainer) -> None:
    """The rollout engine gets the policy's weights, once per version."""
    version = trainer.policy_version
    if trainer.rollout_wg is trainer.actor_wg:
        trainer.actor_wg.update_rollout_weights(version)
        return
    if version == trainer.rollout_version:
        return
    sent = trainer.actor_wg.send_weights(version)
    received = trainer.rollout_wg.receive_weights(version)
    sent.get()
    received.get()
    trainer.rollout_version = version
