"""Which errors another attempt may help against: what died, hangs or lost its peers; never what would happen again."""

from __future__ import annotations

import re

from verl.utils.exceptions import cause_chain

# By name, for their modules import torch or Ray, which may not even be loaded.
_ACCIDENTS = frozenset(
    {
        # Ours: a process is gone or hangs.
        "WorkerDiedError",
        "HangError",
        "RayLostError",
        # Ray's: a process, a node or what they stored is gone.
        "ActorDiedError",
        "ActorUnavailableError",
        "ActorUnschedulableError",
        "LocalRayletDiedError",
        "NodeDiedError",
        "ObjectFetchTimedOutError",
        "ObjectLostError",
        "ObjectReconstructionFailedError",
        "OwnerDiedError",
        "OutOfMemoryError:ray",
        "RaySystemError",
        "RpcError",
        "WorkerCrashedError",
        # torch's: a peer is gone, or the network to it.
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    }
)
# Only if an earlier attempt ran: Ray, or the folder, of the one that died may take its time to go.
_ACCIDENTS_LATER = frozenset({"RayUnavailableError"})
# What a worker raises as a plain RuntimeError when a peer, a network or a device is lost.
_LOST = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|[Ss]ocket [Tt]imeout|NCCL error|ncclRemoteError|ncclSystemError"
    r"|uncorrectable ECC|hardware error|GPU is lost|fallen off the bus|ray\.exceptions\.\w*(Died|Lost|Unavailable)"
)


def restartable(error: BaseException, again: bool = False) -> bool:
    """Whether another attempt may end otherwise. `again`: this is not the first attempt."""
    return any(_is_accident(cause, again) for cause in cause_chain(error))


def place_of(error: BaseException) -> str | None:
    """The step, phase and role of an error that names a role; None of any other.

    A controller in no phase starts, or is between two: that is no place, and dying there twice may be an accident.
    """
    phase, step, role = (getattr(error, name, None) for name in ("phase", "step", "role"))
    if role is None or (phase is None and role == "TaskRunner"):
        return None
    when = f"{phase} of step {step}" if phase is not None else f"while starting, in {getattr(error, 'method', None)}"
    return f"{when}, role {role}"


def _is_accident(cause: BaseException, again: bool) -> bool:
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if type(cause).__module__.startswith("ray."):
        kinds |= {f"{kind}:ray" for kind in kinds}
    if kinds & _ACCIDENTS or (again and kinds & _ACCIDENTS_LATER):
        return True
    said = getattr(cause, "summary", None)
    if said is not None and cause.__cause__ is not None:
        return False  # a worker's own error is its cause
    return isinstance(cause, RuntimeError) and _LOST.search(said or str(cause)) is not None
