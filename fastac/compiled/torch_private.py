"""Private names of torch's compiler (dynamo, AOT, inductor) that fastac uses, in one place.

They were seen in torch 2.9 to 2.15, unless a comment says otherwise. fastac does not import the compiler. Numbers in
comments are issues and pull requests of pytorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext
from torch.fx import traceback

from fastac.engine.torch_private import COMPILED_NODE, function_of

# What stands in a graph. torch documents only the functions that put it there.
FLEX_ATTENTION = torch.ops.higher_order.flex_attention
NESTED_REGION = torch.ops.higher_order.invoke_subgraph
"""What torch.compiler.nested_compile_region becomes in a graph."""


def compile_id() -> str | None:
    """The id, such as "0/1", of dynamo's compilation in this thread; None if there is none."""
    # torch gives the id to callbacks when a compile begins (pytorch#153596). No public function returns it later on.
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def compiled_function(node: Any) -> type | None:
    """The autograd.Function of a compiled graph that an autograd node belongs to; None for any other node."""
    return function_of(node) if node is not None and node.name() == COMPILED_NODE else None


def compile_id_of(function: type) -> str:
    """The id of the compilation that made an autograd.Function; "unknown" before torch 2.12."""
    # pytorch#111519 asks torch for an id on the Function itself. Releases before 2.12 have none on its metadata either.
    return str(getattr(getattr(function, "metadata", None), "compile_id_str", "unknown"))


def module_stack() -> list[tuple[str, Any]]:
    """Path and class of the modules around the operator that AOT traces, outer first, as dynamo noted them."""
    # While AOT interprets dynamo's graph, this is the meta of the node that runs. It will be on the recorded node.
    return list(traceback.current_meta.get("nn_module_stack", {}).values())


# What torch.compile(backend="inductor") makes of its options. Ours is a subclass, so torch treats it like its own: it
# applies mode and options, and a reset of dynamo resets inductor.
_Inductor: Any = getattr(torch, "_TorchCompileInductorWrapper", object)


class InductorWith(_Inductor):  # type: ignore[misc]
    """Inductor as a backend for torch.compile, with a pass of ours over graphs that hold flex_attention.

    Other graphs are compiled as torch does it, with its caches. inductor caches no graph if a custom pass without a
    uuid may change it.
    """

    def __init__(self, graph_pass: Callable[[torch.fx.Graph], None], *options: Any) -> None:
        """options: mode, options and dynamic, as torch.compile takes them."""
        super().__init__(*options)
        self.graph_pass = graph_pass

    def __call__(self, model_: Any, inputs_: Any, *, config_patches: Any = None) -> Any:
        """Compile a graph of dynamo's."""
        patches = dict(config_patches or {})
        graphs = [inner.graph for inner in model_.modules() if isinstance(inner, torch.fx.GraphModule)]
        if any(node.target is FLEX_ATTENTION for graph in graphs for node in graph.nodes):
            from torch._inductor import config

            # The user's passes run first. inductor takes a list of passes since 2.13 (pytorch#184108).
            theirs = self.config.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
            others = theirs if isinstance(theirs, (list, tuple)) else [theirs] * (theirs is not None)
            patches["post_grad_custom_pre_pass"] = [*others, self.graph_pass]
        return super().__call__(model_, inputs_, config_patches=patches)


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a part of a graph that inductor is about to compile. Returns a function of a list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    # inductor reports the strides of outputs to AOT through the context of the compile (pytorch#105010). Those of this
    # part would be taken for those of the whole graph. Nor may a CUDA graph around it own the buffers of the part.
    with config.patch(post_grad_custom_pre_pass=None), TracingContext.patch(output_strides=None):
        compiled: Any = compile_fx_inner(module, inputs, cudagraphs=BoxedBool(False))
    return compiled  # type: ignore[no-any-return]
