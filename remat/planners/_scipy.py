"""The functions of scipy that planners use, which have no type annotations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]
import scipy.sparse  # pyright: ignore[reportMissingTypeStubs]

optimize: Any = scipy.optimize
sparse: Any = scipy.sparse


def components(edges: Sequence[tuple[int, int]], num_nodes: int) -> list[int]:
    """For each node the number of the connected part that it is in."""
    heads, tails = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    ones: Any = np.ones(len(edges), dtype=np.int8)
    graph = sparse.coo_array((ones, (heads, tails)), shape=(num_nodes, num_nodes))
    return sparse.csgraph.connected_components(graph, directed=False)[1].tolist()
