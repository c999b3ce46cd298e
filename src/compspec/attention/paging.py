"""Page tables in the layout of FlashInfer: one flat list of pages, and where each request's part of it begins.

Legend: R requests, Q query rows per request, B blocks per request, N pages of all requests.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedIndices:
    """All int32.

    Attributes:
        qo_indptr: [R + 1], request r has query rows qo_indptr[r] .. qo_indptr[r + 1].
        kv_indptr: [R + 1], and pages kv_indices[kv_indptr[r]] .. kv_indices[kv_indptr[r + 1]].
        kv_indices: [N] block ids.
        last_page_len: [R], 1 .. block_size tokens in the last page.
    """

    qo_indptr: NDArray[np.int32]
    kv_indptr: NDArray[np.int32]
    kv_indices: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


def paged_indices(
    block_table: NDArray[np.int32], starts: NDArray[np.int64], query_len: int, block_size: int
) -> PagedIndices:
    """The pages of R requests with Q rows each, the first of them at `starts`.

    Kernels align the last query row with the last key. So that the real rows meet the right keys, however many of the Q
    are real, the length covers all Q: the rows of padding are the last ones, and what lies beyond the real rows is
    masked for these.

    Args:
        block_table: [R, B]; wide enough for all Q rows, the scratch block where a request has none.
        starts: [R].
    """
    lengths = starts + query_len
    num_pages = -(-lengths // block_size)
    assert num_pages.max() <= block_table.shape[1], "the table is too narrow for the rows of padding"
    taken = np.arange(block_table.shape[1]) < num_pages[:, None]
    return PagedIndices(
        qo_indptr=np.arange(len(starts) + 1, dtype=np.int32) * np.int32(query_len),
        kv_indptr=np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32),
        kv_indices=block_table[taken],
        last_page_len=((lengths - 1) % block_size + 1).astype(np.int32),
    )
