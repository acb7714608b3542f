"""The device mesh: axes `dp_replicate, dp_shard, tp`, outermost first, of which those of degree 1 are left
out.

`dp_shard` is always there, since mixed precision is FSDP's even on one process. Experts that are spread have
a second mesh over the same ranks: `dp_replicate, efsdp, ep, etp`, where `ep` x `etp` ranks hold one copy.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Meshes:
    """What each parallelism needs of the mesh."""

    fsdp: DeviceMesh  # (dp_shard,) or (dp_replicate, dp_shard)
    tp: DeviceMesh | None  # None: no tensor parallelism
    dp: DeviceMesh  # all data-parallel ranks on one axis, for the loss and the counters
    experts: DeviceMesh | None  # (ep,), (ep, etp) or (tp,): a copy of the experts is spread over these
    experts_fsdp: DeviceMesh  # (efsdp,) or (dp_replicate, efsdp); where `ep` is 1: `fsdp`

    @property
    def dp_group(self) -> ProcessGroup:
        return self.dp.get_group()

    @property
    def groups(self) -> list[ProcessGroup]:
        """Every process group of the meshes."""
        meshes = [mesh for mesh in vars(self).values() if mesh is not None]
        groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        return list(dict.fromkeys(groups))

    @property
    def token_groups(self) -> list[ProcessGroup]:
        """Groups that a sum goes over one after another, of what ranks count of their own tokens."""
        return [self.dp_group, *([self.tp.get_group()] if self.tp is not None else [])]

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()


def build_meshes(
    device_type: str, dp_replicate: int, dp_shard: int, tp: int, ep: int = 1, etp: int = 1
) -> Meshes:
    """Return the meshes over all ranks; every rank must call it.

    `dp_replicate` x `dp_shard` x `tp` is the world size. `ep` x `etp` divides `dp_shard` x `tp`; where `ep`
    is 1, experts are split over `tp` like any layer.
    """
    mesh = _mesh(device_type, {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}, "dp_shard")
    fsdp = mesh["dp_replicate", "dp_shard"] if dp_replicate > 1 else mesh["dp_shard"]
    dp = fsdp._flatten("dp") if dp_replicate > 1 else fsdp
    tp_mesh = mesh["tp"] if tp > 1 else None
    if ep == 1:
        return Meshes(fsdp, tp_mesh, dp, experts=tp_mesh, experts_fsdp=fsdp)
    degrees = {"dp_replicate": dp_replicate, "efsdp": dp_shard * tp // (ep * etp), "ep": ep, "etp": etp}
    mesh = _mesh(device_type, degrees, "efsdp")
    experts = mesh["ep", "etp"] if etp > 1 else mesh["ep"]
    efsdp = mesh["dp_replicate", "efsdp"] if dp_replicate > 1 else mesh["efsdp"]
    return Meshes(fsdp, tp_mesh, dp, experts, efsdp)


def _mesh(device_type: str, degrees: dict[str, int], kept: str) -> DeviceMesh:
    axes = {name: degree for name, degree in degrees.items() if degree > 1 or name == kept}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
