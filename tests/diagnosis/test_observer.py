"""The first region of a kind runs under a dispatch mode that changes nothing: the same step, bit for bit.

Kernels of ops of every registration see the dispatch keys that they see without the mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tests.diagnosis.observed import MODES, changed_by, differences, regions
from tests.diagnosis.observed_ops import AT_TIMES, OTHER_PATH, changes_of_op
from tests.torch_data import torch_data

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, on ops without a kernel for autograd

NAMESPACE = "fastac_observed"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DIFFERENTIABLE = "(Tensor x, Tensor y) -> Tensor"


def define(name: str, signature: str = DIFFERENTIABLE, **kernels: Callable[..., Any]) -> Callable[..., Any]:
    """Define an op. kernels: by dispatch key."""
    LIBRARY.define(name + signature)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key, with_keyset=kernel in WITH_KEYSET)
    OPS[name] = getattr(getattr(torch.ops, NAMESPACE), name)
    return OPS[name]


OPS: dict[str, Callable[..., Any]] = {}
WITH_KEYSET: list[Callable[..., Any]] = []


def with_keyset(kernel: Callable[..., Any]) -> Callable[..., Any]:
    WITH_KEYSET.append(kernel)
    return kernel


# Kernels


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * y


class Product(torch.autograd.Function):
    """`product`, with a backward that is wrong by a factor: that it ran shows in the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, op: Callable[..., torch.Tensor] = product) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 3 * grad * y * x.cos(), 3 * grad * x.sin(), None


def autograd_of(name: str) -> Callable[..., Any]:
    """An Autograd kernel that calls the op again, below autograd."""
    return lambda *args: Product.apply(*args, getattr(getattr(torch.ops, NAMESPACE), name))


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(y).add_(1)


def write(x: torch.Tensor, y: torch.Tensor) -> None:
    scaled(x, y)


def several(x: torch.Tensor, others: Any, scale: float | None = None) -> Any:
    first = x * (2 if scale is None else scale)
    return first, [one * first for one in others], others[0].view(-1), 3


def calling(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The kernel of an op that calls others, and so on."""
    copy = x * 1
    in_place(copy, y)
    return cpu(copy, y) + cpu_and_autograd(x, y) + view(composite_explicit(x, y)).sin().sum() * function_in_kernel(x, y)


def conjugated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    pair = torch.complex(x, y)
    lazy = pair.conj()
    return lazy.imag * (lazy @ pair).real + lazy.real.sin()


def conjugated_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of complex tensors, or real ones."""
    return x.conj() * y + (x.conj() @ y.mH) - y.conj().real


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() @ y


@with_keyset
def counted_write(keyset: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A kernel at ADInplaceOrView, as torch makes them for its own ops."""
    torch.autograd.graph.increment_version(x)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        op = getattr(torch.ops, NAMESPACE).counts_its_write.default
        result: torch.Tensor = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, x, y)
        return result


def cast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        result: torch.Tensor = cpu_and_autocast(x.bfloat16(), y.bfloat16())
        return result


@with_keyset
def cast_up(keyset: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An Autocast kernel that goes on in the same call: without autocast, in float32."""
    key = torch._C.DispatchKey.AutocastCPU
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        op = getattr(torch.ops, NAMESPACE).casts_up.default
        below = keyset & torch._C._dispatch_keyset_full_after(key)
        result: torch.Tensor = op.redispatch(below, x.float(), y.float())
        return result


def below_autograd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An Autograd kernel of an op without gradients."""
    with torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = not_differentiable(x, y)
        return result


# Ops

define("composite_implicit", CompositeImplicitAutograd=product)
composite_explicit = define("composite_explicit", CompositeExplicitAutograd=product)
cpu = define("cpu", CPU=product)
cpu_and_autograd = define("cpu_and_autograd", CPU=product, Autograd=autograd_of("cpu_and_autograd"))
define("cpu_and_autograd_cpu", CPU=product, AutogradCPU=autograd_of("cpu_and_autograd_cpu"))
define("explicit_and_autograd", CompositeExplicitAutograd=product, Autograd=autograd_of("explicit_and_autograd"))
define("autograd", Autograd=lambda x, y: Product.apply(x, y))
define("autograd_in_torch_ops", Autograd=product)
not_differentiable = define("not_differentiable", CPU=product, Autograd=below_autograd)
define("falls_through", CPU=product, Autograd=torch.library.fallthrough_kernel)
function_in_kernel = define("function_in_kernel", CPU=lambda x, y: Product.apply(x, y).cos())
define("function_in_explicit", CompositeExplicitAutograd=lambda x, y: Product.apply(x, y).cos())
define("without_grad", CPU=torch.no_grad()(product))
define("detaches", CPU=lambda x, y: product(x.detach(), y))
define("draws", CPU=lambda x, y: torch.dropout(x, 0.5, True) * torch.rand_like(y))
in_place = define("in_place", "(Tensor(a!) x, Tensor y) -> Tensor(a!)", CPU=scaled)
define("in_place_explicit", "(Tensor(a!) x, Tensor y) -> Tensor(a!)", CompositeExplicitAutograd=scaled)
define("writes", "(Tensor(a!) x, Tensor y) -> ()", CPU=write)
define("counts_its_write", "(Tensor(a!) x, Tensor y) -> Tensor(a!)", CPU=scaled, ADInplaceOrView=counted_write)
view = define("view", "(Tensor(a) x) -> Tensor(a)", CPU=lambda x: x.transpose(0, 1)[1:])
define("view_explicit", "(Tensor(a) x) -> Tensor(a)", CompositeExplicitAutograd=lambda x: x[1:])
define(
    "returns_several",
    "(Tensor x, Tensor[] others, float? scale=None) -> (Tensor, Tensor[], Tensor, int)",
    CPU=lambda *args: several(*args),
)
define("lazy", CPU=conjugated)
define("lazy_product", CPU=conjugated_product)
define("lazy_and_autograd", CPU=product, Autograd=autograd_of("lazy_and_autograd"))
define("multiplies", CPU=matmul)
define("multiplies_explicit", CompositeExplicitAutograd=matmul)
cpu_and_autocast = define("cpu_and_autocast", CPU=matmul, AutocastCPU=cast)
define("casts_up", CPU=matmul, AutocastCPU=cast_up)
define("calls_others", CPU=calling)
define("calls_others_and_autograd", CPU=calling, Autograd=autograd_of("calls_others_and_autograd"))
define("calls_others_explicit", CompositeExplicitAutograd=calling)


def define_custom(name: str, kernel: Callable[..., Any], backward: bool = True, **options: Any) -> Any:
    op = torch.library.custom_op(
        f"{NAMESPACE}::{name}", kernel, **{"mutates_args": (), "schema": DIFFERENTIABLE, **options}
    )
    if backward:
        op.register_autograd(
            lambda ctx, grad: Product.backward(ctx, grad)[:2],
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    OPS[name] = op
    return op


define_custom("custom", product, backward=False)
define_custom("custom_with_backward", product)
define_custom("custom_with_autocast", matmul).register_autocast("cpu", torch.bfloat16)
define_custom(
    "custom_that_writes",
    lambda x, y: x.mul_(y) + 1,
    backward=False,
    mutates_args={"x"},
    schema="(Tensor(a!) x, Tensor y) -> Tensor",
)


# What is called


def with_intermediates(op: Callable[..., Any]) -> Callable[..., Any]:
    """A region around an op of two tensors, which it may write. Its inputs are outputs."""

    def region(x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = x * 1, y * 1
        output = op(x, y)
        return x, y, output, [one.tanh() for one in tree_leaves((output, x)) if isinstance(one, torch.Tensor)]

    return region


def on_constants(op: Callable[..., Any]) -> Callable[..., Any]:
    """A region around an op of two tensors without gradient, which it may write."""

    def region(x: torch.Tensor, y: torch.Tensor) -> Any:
        copy = x.detach().clone()
        output = op(copy, y.detach())
        return output, copy, copy * x

    return region


def on_complex(op: Callable[..., Any]) -> Callable[..., Any]:
    """A region around an op that is called with views that are conjugate, and ones that are negative."""

    def region(x: torch.Tensor, y: torch.Tensor) -> Any:
        pair = torch.complex(x, y)
        negative = op(pair.conj().imag, pair.conj().real)
        return negative, op(pair.conj(), pair.mH), negative.cos()

    return region


def written_view(op: Callable[..., Any]) -> Callable[..., Any]:
    """A region that writes the view which an op returns."""

    def region(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x * 1
        viewed = op(x)
        viewed.mul_(y[1:, : viewed.shape[1]])
        return x, viewed, viewed.exp()

    return region


def under(context: Callable[[], Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """A region that calls an op in a context."""

    def region(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x * 1
        with context():
            output = op(x @ y, y.cos())
        return output, x * output.float()

    return region


def half() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def gradient_inside(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Takes a gradient of a CPU kernel's graph, and differentiates it again."""
    output = cpu(x * 1, y * 1)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output, gradient


WRITES = ("in_place", "in_place_explicit", "writes", "counts_its_write")
ON_VIEWS = (
    *("composite_implicit", "composite_explicit", "cpu", "falls_through", "lazy_product", "lazy_and_autograd"),
    "function_in_kernel",
)
UNDER_AUTOCAST = (
    *("cpu", "multiplies", "multiplies_explicit", "cpu_and_autograd", "cpu_and_autocast", "casts_up", "calls_others"),
    *("calls_others_and_autograd", "custom_with_backward", "custom_with_autocast"),
)
ON_CONSTANTS = ("cpu", "autograd", "custom", "custom_that_writes", *WRITES)
NOT_OF_TWO = ("view", "view_explicit", "returns_several")
WITHOUT_GRADIENTS = ("custom", "custom_that_writes")

CASES: dict[str, Callable[..., Any]] = {
    **{name: with_intermediates(op) for name, op in OPS.items() if name not in NOT_OF_TWO + WITHOUT_GRADIENTS},
    **{f"{name} on views": on_complex(OPS[name]) for name in ON_VIEWS},
    **{f"{name} written": written_view(OPS[name]) for name in ("view", "view_explicit")},
    **{f"{name} under autocast": under(half, OPS[name]) for name in UNDER_AUTOCAST},
    **{f"{name} without grad": under(torch.no_grad, OPS[name]) for name in ("cpu", "cpu_and_autograd", "custom")},
    **{f"{name} on constants": on_constants(OPS[name]) for name in ON_CONSTANTS},
    "several outputs": with_intermediates(lambda x, y: OPS["returns_several"](x, [y, x * 2])),
    "several outputs of leaves": lambda x, y: OPS["returns_several"](x, [y], 0.5),
    "a gradient inside": gradient_inside,
    "vmap": lambda x, y: torch.vmap(cpu)(x, y) * torch.vmap(OPS["autograd_in_torch_ops"])(x, y),
    "functionalize": lambda x, y: torch.func.functionalize(lambda x: cpu_and_autograd(x * 1, y))(x),
    "ops of torch": lambda x, y: [
        *(F.layer_norm(x, (4,)), F.dropout(y.abs().sqrt()), x.cumsum(0)),
        *(torch.linalg.slogdet(x), x.sort(), x.index_put((torch.tensor([0, 2]),), y[:2]), x.to_sparse() @ y),
        *(torch.fft.rfft2(x), x.unfold(0, 2, 1).amax(-1), F.cross_entropy(y, torch.arange(4)), x.std(0), x.bfloat16()),
    ],
    "conjugation in kernels of torch": lambda x, y: torch.linalg.pinv(torch.complex(x, y)),
}


def inputs() -> Any:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)], {}


@pytest.mark.parametrize("case", CASES)
def test_a_mode_changes_nothing(case: str) -> None:
    assert changed_by(MODES, CASES[case], inputs()) == {name: [] for name in MODES}


@pytest.mark.parametrize("case", CASES)
def test_regions_change_nothing(case: str) -> None:
    """The first region of a kind is watched, the second is not."""
    expected, found = [list(regions(CASES[case], inputs(), policy)) for policy in ("none", "attn_only")]
    assert [differences(*pair) for pair in zip(found, expected, strict=True)] == [[], []]
    assert all("gradient 0" in one for one in expected if isinstance(one, dict) or pytest.fail(str(one)))


@pytest.mark.slow
def test_ops_of_torch() -> None:
    """Some of them; `make soak` takes all."""
    counts: Counter[str] = Counter()
    ops = [op for op in torch_data()[0] if op.full_name not in OTHER_PATH | AT_TIMES][::36]
    wrong = [line for op in ops for line in changes_of_op(op, (torch.float32, torch.complex64), 2, MODES, counts)]
    assert not wrong, "\n".join(wrong)
    assert counts["ops"] > 15
    assert counts["exact"] > 150
