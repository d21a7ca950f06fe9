"""Find the transformer blocks of a model, and the model inside a training script's wrappers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from fastac.engine.blocks import inside, is_inside
from fastac.engine.checkpoint_wrappers import plain_name
from fastac.errors import FastacError, class_name, did_you_mean
from fastac.models.switches import is_by_forward

logger = logging.getLogger("fastac")

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""Modules that may hold blocks, called lists here."""
# The forwards of lists that do nothing but hold their members, or call them in turn.
_NO_FORWARD = (torch.nn.Module.forward, torch.nn.Sequential.forward)

Blocks = dict[str, torch.nn.Module]
"""Blocks by qualified name, each as the module inside torch's activation wrappers."""

_DUAL_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")
_LISTS_OF_CLASS = {
    "ConsisIDTransformer3DModel": ("transformer_blocks",),
    "HunyuanVideoTransformer3DModel": _DUAL_AND_SINGLE,
    "HunyuanVideoFramepackTransformer3DModel": _DUAL_AND_SINGLE,
    "Lumina2Transformer2DModel": ("layers",),
}
"""By class of diffusers (0.42), the lists of blocks, if other lists hold attention and `_repeated_blocks` does not tell
them apart: refiners and face adapters attend as well, and are not checkpointed."""


def block_lists(model: torch.nn.Module) -> dict[str, Blocks]:
    """The lists of a model's blocks, by name: the outermost lists whose members all hold attention.

    They name blocks in policies, reports and plans. A model that calls a checkpointing function chooses itself which
    blocks it checkpoints.
    """
    lists = _lists(model)
    if (names := _LISTS_OF_CLASS.get(class_name(model))) is not None:
        return {name: blocks for name, blocks in lists.items() if name in names}
    attending = _outermost(lists, _have_attention)
    # Classes of blocks, by which diffusers compiles a model in parts.
    repeated = getattr(model, "_repeated_blocks", None) or ()
    declared = {
        name: blocks
        for name, blocks in attending.items()
        if all(class_name(unwrapped(block)) in repeated for block in blocks.values())
    }
    return declared or attending


def by_list(blocks: Mapping[str, torch.nn.Module]) -> dict[str, Blocks]:
    """Blocks by the name of the module that holds them; a block at the root is listed under its own name."""
    lists: dict[str, Blocks] = {}
    for name, block in blocks.items():
        lists.setdefault(name.rpartition(".")[0] or name, {})[name] = block
    return lists


def _lists(model: torch.nn.Module) -> dict[str, Blocks]:
    return {
        name: {f"{name}.{key}": inside(member) for key, member in module._modules.items() if member is not None}
        for name, module in model.named_modules()
        # A dict of lists only groups lists of blocks, which are found by themselves.
        if isinstance(module, LISTS) and not _is_dict_of_lists(module)
    }


def _outermost(
    lists: Mapping[str, Blocks], are_blocks: Callable[[Collection[torch.nn.Module]], bool]
) -> dict[str, Blocks]:
    found = {name: blocks for name, blocks in lists.items() if blocks and are_blocks(blocks.values())}
    # A block may hold lists of attention itself. The list around it is the list of blocks.
    return {name: found[name] for name in found if not name.startswith(tuple(outer + "." for outer in found))}


def _is_dict_of_lists(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleDict) and any(isinstance(inner, LISTS) for inner in module.values())


def _have_attention(members: Collection[torch.nn.Module]) -> bool:
    def has_attention(block: torch.nn.Module) -> bool:
        names = (f"{name} {class_name(inner)}".lower() for name, inner in block.named_modules())
        return any("attention" in name or "attn" in name for name in names)

    # All members, because a list with one that has no attention is a list of stages: the blocks are deeper.
    return all(map(has_attention, members))


def _may_be_blocks(members: Collection[torch.nn.Module]) -> bool:
    """Whether they have attention, or are several with parts: as Flux's single blocks, which call it themselves."""
    have_parts = (any(any(True for _ in part.parameters()) for part in block.children()) for block in members)
    return _have_attention(members) or (len(members) > 1 and all(have_parts))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, FullyShardedDataParallel, torch.compile's OptimizedModule, PeftModel.

    These may be nested in any order, also inside another wrapper that holds a diffusers model as `module` (DeepSpeed's
    engine). A model without a wrapper is returned unchanged.
    """
    while (inner := _inner(model)) is not None and inner is not model:
        model = inner
    return model


def check_module(model: object, call: str) -> torch.nn.Module:
    """The model inside its wrappers. Raises FastacError if it is not a module. call: the public function's name."""
    if not isinstance(model, torch.nn.Module):
        raise FastacError(
            f"{call}: expected a model, got {type(model).__name__}. With a pipeline, pass its transformer: "
            f"{call}(pipe.transformer)."
        )
    return unwrapped(model)


def _inner(model: torch.nn.Module) -> torch.nn.Module | None:
    children = model._modules
    # Wrappers are known by the names of their children, so that peft and FSDP need not be imported.
    if "_orig_mod" in children:
        return children["_orig_mod"]
    if hasattr(type(model), "get_base_model") and "base_model" in children:  # peft
        return model.get_base_model()  # type: ignore[operator, no-any-return]
    if "_fsdp_wrapped_module" in children:
        return children["_fsdp_wrapped_module"]
    inner = children.get("module")
    # A child called `module` is not enough, since any model may have one: the wrapper is one of torch's, or the child
    # is a diffusers model.
    data_parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, data_parallel) or hasattr(type(inner), "enable_gradient_checkpointing"):
        return inner
    return None


def choose_blocks(model: torch.nn.Module, blocks: Any, outer: torch.nn.Module) -> Blocks:
    """A model's blocks, as `enable` takes `blocks`.

    Args:
        outer: the wrapper around the model, or the model itself.

    Raises:
        FastacError: none are named, and several lists may hold them, or none; or as `_named_blocks`.
    """
    if blocks is not None:
        return _named_blocks(model, blocks, outer)
    lists = block_lists(model)
    # A model with a checkpointing function chooses its blocks itself, so here names are all that is needed.
    if lists and not is_by_forward(model, blocks):
        return {name: block for members in lists.values() for name, block in members.items()}
    possible = _outermost(_lists(model), _may_be_blocks)
    # If no part has attention in its name, blocks of one class may still call attention functions themselves. They are
    # taken: the first region shows whether they do, and a list that holds no attention is an error then.
    taken = [*lists] or [name for name, members in possible.items() if len(set(map(type, members.values()))) == 1]
    # Several lists are an error: the blocks of a list that was not taken would train without checkpointing.
    if len(taken) != 1 or len(possible) != 1:
        some = f"{len(possible)} module lists whose members may be its blocks" if taken else "no list of attention"
        raise FastacError(f"{class_name(model)} has {some}. {name_blocks(model, possible)}")
    logger.info("%s: took the blocks in %r, the only list of them", class_name(model), taken[0])
    return _named_blocks(model, taken[0], outer)


def _named_blocks(
    model: torch.nn.Module, blocks: str | torch.nn.Module | Iterable[Any], outer: torch.nn.Module
) -> Blocks:
    """The blocks that `enable(model, blocks=...)` names. Raises FastacError for none, a stranger, or nested blocks."""
    several = [blocks] if isinstance(blocks, (str, torch.nn.Module)) or not isinstance(blocks, Iterable) else blocks
    names = {module: name for name, module in model.named_modules()}
    named: Blocks = {}
    for given in several:
        module = _by_name(given, model, outer) if isinstance(given, str) else given
        if not isinstance(module, torch.nn.Module) or module not in names:
            raise FastacError(
                f"enable(blocks=...): {type(given).__name__} is not a module of {class_name(model)}. Give the dotted "
                f'name of a module list, such as "transformer.layers", or modules of the model.'
            )
        # A list with a forward of its own is called as a whole, so it is a block itself.
        is_list = isinstance(module, LISTS) and type(module).forward in _NO_FORWARD
        for block in module.children() if is_list else (module,):
            # Blocks have the names that they have without torch's activation wrappers, so that policies fit both.
            named[plain_name(names[block])] = inside(block)
    if not named:
        raise FastacError("enable(blocks=...): there is no block in it")
    for name in named:
        around = [other for other in named if name != other and is_inside(name, other)]
        if around:
            raise FastacError(f"enable(blocks=...): block {name!r} is inside block {around[0]!r}. Name one of them.")
    return named


def _by_name(name: str, model: torch.nn.Module, outer: torch.nn.Module) -> torch.nn.Module:
    for holder in (model, outer):
        try:
            return holder.get_submodule(name)
        except AttributeError:
            pass
    meant = did_you_mean(name, [known for known, _ in model.named_modules()])
    raise FastacError(f"enable(blocks={name!r}): {class_name(model)} has no such module.{meant} {module_lists(model)}")


def module_lists(model: torch.nn.Module) -> str:
    """A sentence that names the module lists of a model."""
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    return (
        f"Its module lists are {', '.join(map(repr, lists[:8]))}." if lists else "It has no module list: give modules."
    )


def name_blocks(model: torch.nn.Module, lists: Iterable[str]) -> str:
    """A sentence that says how to pass `blocks=`: the lists, or if there are none, the module lists of the model."""
    names = [f'"{name}"' for name in lists]
    written = (f"[{', '.join(names)}]" if len(names) > 1 else names[0]) if names else '"..."'
    return f"Name them, as in fastac.enable(model, blocks={written}).{'' if names else f' {module_lists(model)}'}"
