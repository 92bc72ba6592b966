"""What PyTorch Geometric's loaders are tested with; it takes long to import."""

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

__all__ = ["Data", "Neighbours", "NodeLoader"]


class Neighbours(BaseSampler):
    """Takes the nodes that are asked for, and the next of each."""

    def sample_from_nodes(self, index: Any, **_: Any) -> SamplerOutput:
        node = torch.cat([index.node, (index.node + 1) % 6]).unique()
        nothing = torch.empty(0, dtype=torch.long)
        return SamplerOutput(node=node, row=nothing, col=nothing, edge=nothing, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any, **_: Any) -> SamplerOutput:
        raise AssertionError("nodes are asked for")

    @property
    def edge_permutation(self) -> None:
        return None
