"""Prepared calls by the forms of their tensors, checked by the guards of torch's compiler: a tenth of a key's time.

`calls` makes a key of every tensor's shape, strides and dtype. Here a call is found by its constants and the shape of
its first tensor, and torch compares the others with those of a call that went through all checks:

    class, dtype, device, sizes, strides                     of each tensor
    dispatch keys, with those that a mode, a transform,      as they were: a tensor that holds its negative, inference
        a tracer, inference mode or autocast adds            mode or not, for instance
    requires a gradient, where grad mode is on               never
    one object twice                                         never: such a call is found by its key

What isn't found here is looked for by its key.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from envoi.runtime import shortcuts
from envoi.runtime.prepared.replay import Prepared

MOST_VARIANTS = 4  # of strides, dtypes and modes that a form is looked up for
_guards: Any = getattr(shortcuts.GUARDS, "TensorGuards", None)


class Variant(NamedTuple):
    """Prepared call, and what its tensors have to be.

    check: torch's guards for the tensors that aren't None; pick: takes these out of all, None where that is all of
    them; absent: the places of the others.
    """

    check: Callable[..., bool]
    num_tensors: int
    device: int
    pick: Callable[[Sequence], tuple] | None
    absent: tuple[int, ...]
    call: Prepared


class Forms:
    """Variants of calls by constants and the shape of their first tensor; at most `most` of these."""

    def __init__(self, most: int) -> None:
        self.known: dict[Any, tuple[Variant, ...]] = {}
        self.most = most

    def find(self, constants: tuple, tensors: Sequence[torch.Tensor | None], device: int) -> Prepared | None:
        """Return the prepared call that these tensors fit, None if there is none. device: the current one."""
        first: Any = tensors[0]
        for variant in self.known.get((constants, first.shape), ()):
            if variant.device != device or len(tensors) != variant.num_tensors:
                continue
            for place in variant.absent:
                if tensors[place] is not None:
                    break
            else:
                # A None among the picked fails the check like any other object that is no tensor.
                if variant.check(*(tensors if variant.pick is None else variant.pick(tensors))):
                    return variant.call
        return None

    def add(self, constants: tuple, tensors: Sequence[torch.Tensor | None], call: Prepared) -> None:
        """Add a call that went through all checks, so that its tensors are on one device.

        Nothing happens where torch has no such guards.
        """
        present = tuple(i for i, x in enumerate(tensors) if x is not None)
        absent = tuple(i for i, x in enumerate(tensors) if x is None)
        given: list[Any] = [tensors[i] for i in present]
        check = _check_of(given)
        if check is None or not check(*given):
            return
        if len(self.known) >= self.most:
            self.known.clear()
        key = constants, given[0].shape
        variants = self.known.get(key, ())
        pick = _picker(present) if absent else None
        variant = Variant(check, len(tensors), given[0].get_device(), pick, absent, call)
        self.known[key] = (*variants[-MOST_VARIANTS + 1 :], variant)

    def forget(self, call: Prepared) -> None:
        """Forget all variants of a call."""
        kept = {key: tuple(v for v in variants if v.call is not call) for key, variants in self.known.items()}
        self.known = {key: variants for key, variants in kept.items() if variants}


def _picker(places: tuple[int, ...]) -> Callable[[Sequence], tuple]:
    """Return a function that takes these places out of a sequence, as a tuple."""
    take = itemgetter(*places)
    return take if len(places) > 1 else lambda found: (take(found),)


def _check_of(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    if _guards is None:
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError):  # another release of torch
        return None
