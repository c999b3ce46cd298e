"""Passes over the graphs that Inductor compiles."""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import compspec.kernels.packed  # noqa: F401  (registers the operator)


class ShareProducts(CustomGraphPass):
    """Layers that share a packed weight multiply once; each takes its part of the result.

    Every such layer asks for the whole product (see `PackedLinear`). The operator has no effects, so of two calls with
    the same arguments one is enough.
    """

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        """Replaces repeated products in a graph."""
        first: dict[tuple[Any, ...], torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.compspec.packed_linear.default:
                kept = first.setdefault(node.args, node)
                if kept is not node:
                    node.replace_all_uses_with(kept)
                    graph.erase_node(node)

    def uuid(self) -> Any:
        """Part of the key under which compiled code is cached."""
        return get_hash_for_files((__file__,))
