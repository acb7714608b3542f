"""The device mesh: axes `pp, dp_replicate, dp_shard, cp, tp`, outermost first, of which those of degree 1 are
left out.

FSDP shards parameters over `dp_shard` x `cp` as one axis, `fsdp`, which is always there, since mixed
precision is FSDP's even on one process. Experts that are spread have a mesh of their own over the same ranks:
`pp, dp_replicate, efsdp, ep, etp`, where `ep` x `etp` ranks hold one copy.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Meshes:
    """What each parallelism needs of the mesh."""

    fsdp: DeviceMesh  # (fsdp,) or (dp_replicate, fsdp)
    tp: DeviceMesh | None  # None: no tensor parallelism
    cp: DeviceMesh | None  # None: no context parallelism
    pp: DeviceMesh | None  # None: no pipeline
    dp: DeviceMesh  # the ranks that read different samples, on one axis
    tokens: (
        DeviceMesh  # dp and cp, on one axis: the ranks with different tokens, for the loss and the counters
    )
    experts: DeviceMesh | None  # (ep,), (ep, etp) or (tp,): a copy of the experts is spread over these
    experts_fsdp: DeviceMesh  # (efsdp,) or (dp_replicate, efsdp); where `ep` is 1: `fsdp`

    @property
    def loss_group(self) -> ProcessGroup:
        """The ranks over which losses, labels and counts of tokens add up."""
        return self.tokens.get_group()

    @property
    def groups(self) -> list[ProcessGroup]:
        """Every process group of the meshes."""
        meshes = [mesh for mesh in vars(self).values() if mesh is not None]
        groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        return list(dict.fromkeys(groups))

    @property
    def token_groups(self) -> list[ProcessGroup]:
        """Groups that a sum goes over one after another, of what ranks count of their own tokens."""
        return [self.loss_group, *([self.tp.get_group()] if self.tp is not None else [])]

    @property
    def sequence_groups(self) -> list[ProcessGroup]:
        """Groups that such a sum goes over to be of whole sequences."""
        return [mesh.get_group() for mesh in (self.cp, self.tp) if mesh is not None]

    @property
    def pipeline_group(self) -> ProcessGroup | None:
        """The ranks that have the stages of one pipeline; None where there is none."""
        return None if self.pp is None else self.pp.get_group()

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()


def build_meshes(
    device_type: str,
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
) -> Meshes:
    """Return the meshes over all ranks; every rank must call it.

    `pp` x `dp_replicate` x `dp_shard` x `cp` x `tp` is the world size. `ep` x `etp` divides the last three
    together; where `ep` is 1, experts are split over `tp` like any layer.
    """
    outer = {"pp": pp, "dp_replicate": dp_replicate}
    mesh = _mesh(device_type, {**outer, "fsdp": dp_shard * cp, "tp": tp}, "fsdp")
    fsdp = _with_replicas(mesh, "fsdp")
    tokens = fsdp._flatten("tokens") if dp_replicate > 1 else fsdp
    dp, cp_mesh = tokens, None
    if cp > 1:  # the same ranks once more, for groups only
        groups = _mesh(device_type, {**outer, "dp_shard": dp_shard, "cp": cp, "tp": tp}, "dp_shard")
        dp, cp_mesh = _with_replicas(groups, "dp_shard"), groups["cp"]
        dp = dp._flatten("dp") if dp_replicate > 1 else dp
    tp_mesh = mesh["tp"] if tp > 1 else None
    experts, efsdp = tp_mesh, fsdp
    if ep > 1:
        shards = dp_shard * cp * tp // (ep * etp)
        spread = _mesh(device_type, {**outer, "efsdp": shards, "ep": ep, "etp": etp}, "efsdp")
        experts, efsdp = spread["ep", "etp"] if etp > 1 else spread["ep"], _with_replicas(spread, "efsdp")
    pp_mesh = mesh["pp"] if pp > 1 else None
    return Meshes(fsdp, tp_mesh, cp_mesh, pp_mesh, dp, tokens, experts, efsdp)


def _mesh(device_type: str, degrees: dict[str, int], kept: str) -> DeviceMesh:
    axes = {name: degree for name, degree in degrees.items() if degree > 1 or name == kept}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _with_replicas(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    return mesh["dp_replicate", axis] if "dp_replicate" in (mesh.mesh_dim_names or ()) else mesh[axis]
