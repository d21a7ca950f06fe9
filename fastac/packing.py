"""How a forward's outputs, and what it saved for backward, pass through an op that returns a list of tensors.

The last tensor of the list is one of numbers, which say what the others are:
handle, single, outputs..., saved for backward..., not differentiable...
where each of the three begins with its length. A tensor is written as its place in the list, an input of the call as
-2 - its place among the inputs, and None as -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastac import torch_internals
from fastac.errors import FastacError

_NONE, _INPUTS = -1, -2


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, those in lists and tuples too."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


class State:
    """What a forward sets on its context besides what it saves: attributes, and whether gradients are materialized."""

    materializes: bool | None = None
    attributes: Mapping[str, Any] = {}

    def run(self, forward: Callable[..., Any], context: Any, args: Sequence[Any]) -> Any:
        """The outputs of a forward. Takes note of what it sets."""
        set_materialize_grads = context.set_materialize_grads

        def noted(value: bool) -> None:
            self.materializes = value
            set_materialize_grads(value)

        context.set_materialize_grads = noted  # it can be set, and not be read
        try:
            outputs = forward(context, *args)
        finally:
            del context.set_materialize_grads
        self.attributes = dict(vars(context))
        return outputs

    def put_on(self, context: Any) -> None:
        """Set the same on another context."""
        vars(context).update(self.attributes)
        if self.materializes is not None:
            context.set_materialize_grads(self.materializes)


def pack(context: Any, outputs: Any, inputs: Sequence[torch.Tensor], handle: int) -> list[torch.Tensor]:
    """What the op returns for a forward that has just run with a context and returned these outputs.

    Raises FastacError for what can not pass: a tensor that was marked dirty, an output that is neither tensor nor None.
    """
    single = not isinstance(outputs, tuple)  # a list is no tuple of outputs, to autograd
    outputs = (outputs,) if single else outputs
    _check(context, outputs)
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def places_of(values: Sequence[Any], among: dict[int, int]) -> list[int]:
        found = [len(values)]
        for value in values:
            if value is not None and id(value) not in among and id(value) not in places:
                places[id(value)] = len(tensors)
                tensors.append(value)
            found.append(_NONE if value is None else among[id(value)] if id(value) in among else places[id(value)])
        return found

    known = {id(tensor): _INPUTS - place for place, tensor in enumerate(inputs)}
    numbers = [handle, int(single), *places_of(outputs, known)]
    # An input of whole numbers may be a choice of blocks, which recompute must not make again: kept, like an output.
    known = {id(tensor): _INPUTS - place for place, tensor in enumerate(inputs) if tensor.is_floating_point()}
    to_save, non_differentiable, _ = torch_internals.given_to(context)
    numbers += places_of(to_save, known)
    numbers += places_of(non_differentiable, known)
    return [*tensors, torch.tensor(numbers)]


def _check(context: Any, outputs: tuple[Any, ...]) -> None:
    name = context.name().removesuffix("Backward")
    *_, dirty = torch_internals.given_to(context)
    if dirty:
        raise FastacError(
            f"{name} calls mark_dirty: on replay its kernel does not run, and the write would be missing. "
            f'Return a new tensor instead, or use policy="full" for this block.'
        )
    for output in outputs:
        if output is not None and not isinstance(output, torch.Tensor):
            raise FastacError(
                f"{name} returns a {type(output).__name__}, which can not be saved: make_visible needs outputs that "
                f'are tensors or None. Keep other values on the context, or use policy="full" for this block.'
            )


def beside_outputs(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a packed list that are none of the outputs."""
    *tensors, layout = flat
    numbers = layout.tolist()
    own = set(numbers[3 : 3 + numbers[2]])
    return [tensor for place, tensor in enumerate(tensors) if place not in own]


def unpack(
    context: Any, tensors: Sequence[torch.Tensor], numbers: Sequence[int], inputs: Sequence[torch.Tensor]
) -> Any:
    """The outputs of the forward, and on the context what it had saved there.

    numbers: those that the last of the tensors holds.
    """
    remaining = iter(numbers)
    next(remaining)
    single = next(remaining)

    def values() -> list[torch.Tensor | None]:
        return [_value(next(remaining), tensors, inputs) for _ in range(next(remaining))]

    outputs, saved, constant = tuple(values()), values(), values()
    context.save_for_backward(*saved)
    if constant:
        context.mark_non_differentiable(*constant)
    return outputs[0] if single else outputs


def _value(place: int, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if place == _NONE:
        return None
    return inputs[_INPUTS - place] if place <= _INPUTS else tensors[place]
