"""LightGBM's trees as arrays, and their predictions compiled: microseconds a row, no lock of Python.

Missing values and categories are not known here: the features that `features` makes have neither.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError

SPLIT = np.dtype([("feature", "i4"), ("left", "i4"), ("right", "i4"), ("threshold", "f8")])
"""A split; children at 0 or above are splits, below are leaves, ~child their number."""
_NUMERICAL = 2
"""LightGBM's decision type: not categorical, missing values not handled (other bits are 0)."""


class Forest(NamedTuple):
    """Trees one after the other; a tree of one leaf has the root ~leaf."""

    roots: NDArray[np.int32]
    splits: NDArray[np.void]
    leaves: NDArray[np.float64]

    @classmethod
    def constant(cls, value: float) -> Forest:
        """A forest that always says the same."""
        return cls(np.array([-1], np.int32), np.empty(0, SPLIT), np.array([value]))

    @classmethod
    def parse(cls, text: str) -> Forest:
        """From `Booster.model_to_string`.

        Raises:
            ArtefactError: the text is no model of numerical splits.
        """
        roots, splits, leaves = [], [], []
        n_splits = n_leaves = 0
        for block in text.split("\nTree=")[1:]:
            fields = dict(line.split("=", 1) for line in block.splitlines()[1:] if "=" in line)
            values = np.array(fields["leaf_value"].split(), np.float64)
            if int(fields["num_leaves"]) > 1:
                tree = np.empty(values.size - 1, SPLIT)
                kinds = np.array(fields["decision_type"].split(), np.int64)
                if (kinds & ~_NUMERICAL).any():
                    raise ArtefactError(f"decision types {np.unique(kinds)} are not numerical ones")
                tree["feature"] = np.array(fields["split_feature"].split(), np.int32)
                tree["threshold"] = np.array(fields["threshold"].split(), np.float64)
                for side in ("left", "right"):
                    child = np.array(fields[f"{side}_child"].split(), np.int32)
                    tree[side] = np.where(child < 0, child - n_leaves, child + n_splits)
                splits.append(tree)
                roots.append(n_splits)
                n_splits += tree.size
            else:
                roots.append(~n_leaves)
            leaves.append(values)
            n_leaves += values.size
        if not roots:
            raise ArtefactError("the text holds no tree")
        joined = np.concatenate(splits) if splits else np.empty(0, SPLIT)
        return cls(np.array(roots, np.int32), joined, np.concatenate(leaves))

    def predict(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Sums over the trees [n] for rows [n, features]."""
        out = np.zeros(rows.shape[0])
        _predict(self.roots, self.splits, self.leaves, rows, out)
        return out


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _predict(roots: Any, splits: Any, leaves: Any, rows: Any, out: Any) -> None:
    for r in range(rows.shape[0]):
        for i in roots:
            while i >= 0:
                split = splits[i]
                i = split.left if rows[r, split.feature] <= split.threshold else split.right
            out[r] += leaves[~i]
