"""Peak memory of a block of torch code, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Most bytes of storages alive at once, of those allocated inside: `with PeakMemory() as peak: ...`

    Storages are seen as they leave an operator; what a kernel allocates for itself alone is not.

    Attributes:
        bytes: the peak so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(output):
            key = storage._cdata
            if key not in given and key not in self._alive:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key)
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return output


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
