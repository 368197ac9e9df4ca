"""Workspace of a compression whose work is shared by workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tnlib_adapters.compression.cluster.connection import Cluster
from tnlib_adapters.compression.methods.out_of_core import Workspace


class ClusterWorkspace(Workspace):
    """A workspace with workers: what holds it finds them by `cluster_of`."""

    def __init__(self, cluster: Cluster, max_bytes: float, folder: Callable[[], Path]) -> None:
        super().__init__(max_bytes, folder)
        self.cluster = cluster


def workspace_with(cluster: Cluster | None, max_bytes: float, folder: Callable[[], Path]) -> Workspace:
    """Return a workspace, with these workers if there are any."""
    return Workspace(max_bytes, folder) if cluster is None else ClusterWorkspace(cluster, max_bytes, folder)


def cluster_of(workspace: Workspace | None) -> Cluster | None:
    """Return the workers of a workspace, None for none."""
    return workspace.cluster if isinstance(workspace, ClusterWorkspace) else None
