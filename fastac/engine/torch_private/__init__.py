"""Private names of torch that the engine uses, by subject: tensors, autograd, the dispatcher, dynamo, processes.

Seen in torch 2.9 to 2.15. They are looked up when fastac is first used, not at its import. A name that this torch lacks
is an ImportError that gives the name and the torch version (`names`). Every name has its reason where it is used, with
the upstream change that would replace it, if there is one: pytorch#1234 is issue or pull request 1234 of
github.com/pytorch/pytorch. Private names of the compiler are in `fastac.compiled.torch_private`, those of traces in
`fastac.graph.torch_private`, and those of ops in `fastac.registry.torch_private`.

Callers write `torch_private.name`: this module has the functions of all five.
"""

from fastac.engine.torch_private import names as names  # first: it raises before the others use what may be missing
from fastac.engine.torch_private.autograd import *  # noqa: F403
from fastac.engine.torch_private.dispatcher import *  # noqa: F403
from fastac.engine.torch_private.dynamo import *  # noqa: F403
from fastac.engine.torch_private.processes import *  # noqa: F403
from fastac.engine.torch_private.tensors import *  # noqa: F403
