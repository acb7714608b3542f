"""The device mesh: axes `dp_replicate, dp_shard, tp`, outermost first, of which those of degree 1 are left
out.

`dp_shard` is always there, since mixed precision is FSDP's even on one process.
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

    @property
    def dp_group(self) -> ProcessGroup:
        return self.dp.get_group()

    @property
    def groups(self) -> list[ProcessGroup]:
        """Every process group of the meshes."""
        meshes = [mesh for mesh in (self.fsdp, self.tp, self.dp) if mesh is not None]
        groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        return list(dict.fromkeys(groups))

    @property
    def token_groups(self) -> list[ProcessGroup]:
        """Groups that a sum goes over one after another, of what ranks count of their own tokens."""
        return [self.dp_group, *([self.tp.get_group()] if self.tp is not None else [])]

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()


def build_meshes(device_type: str, dp_replicate: int, dp_shard: int, tp: int) -> Meshes:
    """Return the meshes over all ranks; every rank must call it. The degrees multiply to the world size."""
    degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    axes = {name: degree for name, degree in degrees.items() if degree > 1 or name == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    fsdp = mesh["dp_replicate", "dp_shard"] if dp_replicate > 1 else mesh["dp_shard"]
    dp = fsdp._flatten("dp") if dp_replicate > 1 else fsdp
    return Meshes(fsdp, mesh["tp"] if tp > 1 else None, dp)
