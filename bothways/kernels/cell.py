"""An LSTM cell with what follows it: x' = norm(x + dropout(h)); and an output z = dropout(tanh(·)). One row a program.

Backward computes the gates anew from the same sums, so that nothing is kept of them in a lower precision; a cell's
state, the normalization and all sums are float32. Weights' gradients of the normalization are added up row by row.
"""

import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.pointwise import tanh

WARPS = 4
EPSILON = 1e-5  # nn.LayerNorm's


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _gate(product, given, at, inside):
    x = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    return x + tl.load(given + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _cell(product, given, c, at, inside, E: tl.constexpr):
    i = _sigmoid(_gate(product, given, at, inside))
    f = _sigmoid(_gate(product + E, given + E, at, inside))
    g = tanh(_gate(product + 2 * E, given + 2 * E, at, inside), False)
    o = _sigmoid(_gate(product + 3 * E, given + 3 * E, at, inside))
    before = tl.load(c + at, mask=inside, other=0.0)
    return i, f, g, o, before, f * before + i * g


@triton.jit
def _normalized(x, inside, E: tl.constexpr, epsilon):
    centred = tl.where(inside, x - tl.sum(tl.where(inside, x, 0.0), axis=0) / E, 0.0)
    rate = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / E + epsilon)
    return centred * rate, rate


@triton.jit
def _advance(
    product, given, given_row, c, after, kept, scale, x, gain, shift, h, out, out_row, epsilon,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < E
    _, _, _, o, _, new = _cell(product + row * 4 * E, given + row * given_row * E, c + row * E, at, inside, E)
    tl.store(after + row * E + at, new, mask=inside)
    value = o * tanh(new, False)
    tl.store(h + row * 2 * E + at, value.to(h.dtype.element_ty), mask=inside)
    if kept is not None:
        value *= scale * tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
    if x is not None:
        value += tl.load(x + row * 2 * E + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = _normalized(value, inside, E, epsilon)
    value = value * tl.load(gain + at, mask=inside, other=0.0) + tl.load(shift + at, mask=inside, other=0.0)
    tl.store(out + row * out_row * E + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _advance_backward(
    product, given, given_row, c, kept, scale, x, gain, grad_a, grad_a_row, grad_b, grad_c, grad_h,
    grad_cell, grad_gates, grad_x, grad_norm, epsilon,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < E
    i, f, g, o, before, new = _cell(product + row * 4 * E, given + row * given_row * E, c + row * E, at, inside, E)
    bent = tanh(new, False)
    share = tl.full([BLOCK], 1.0, tl.float32)
    if kept is not None:
        share = scale * tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
    value = o * bent * share
    if x is not None:
        value += tl.load(x + row * 2 * E + at, mask=inside, other=0.0).to(tl.float32)
    value, rate = _normalized(value, inside, E, epsilon)
    grad = tl.load(grad_a + row * grad_a_row * E + at, mask=inside, other=0.0).to(tl.float32)
    grad += tl.load(grad_b + row * E + at, mask=inside, other=0.0).to(tl.float32)
    if grad_c is not None:
        grad += tl.load(grad_c + row * E + at, mask=inside, other=0.0).to(tl.float32)
    sums = grad_norm + row * 2 * E + at
    tl.store(sums, tl.load(sums, mask=inside, other=0.0) + grad * value, mask=inside)
    tl.store(sums + E, tl.load(sums + E, mask=inside, other=0.0) + grad, mask=inside)
    grad *= tl.load(gain + at, mask=inside, other=0.0)
    grad = (grad - tl.sum(grad, axis=0) / E - value * (tl.sum(grad * value, axis=0) / E)) * rate
    if x is not None:
        tl.store(grad_x + row * E + at, grad, mask=inside)
    grad = grad * share + tl.load(grad_h + row * 2 * E + at, mask=inside, other=0.0).to(tl.float32)
    grad_new = tl.load(grad_cell + row * E + at, mask=inside, other=0.0) + grad * o * (1 - bent * bent)
    tl.store(grad_cell + row * E + at, grad_new * f, mask=inside)
    out = grad_gates + row * 4 * E + at
    tl.store(out, (grad_new * g * i * (1 - i)).to(grad_gates.dtype.element_ty), mask=inside)
    tl.store(out + E, (grad_new * before * f * (1 - f)).to(grad_gates.dtype.element_ty), mask=inside)
    tl.store(out + 2 * E, (grad_new * i * (1 - g * g)).to(grad_gates.dtype.element_ty), mask=inside)
    tl.store(out + 3 * E, (grad * bent * o * (1 - o)).to(grad_gates.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["out_row"])
def _output(product, kept, scale, out, out_row, again, E: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < E
    z = tanh(tl.load(product + row * E + at, mask=inside, other=0.0).to(tl.float32), False)
    if kept is not None:
        z *= scale * tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * out_row * E + at, z.to(out.dtype.element_ty), mask=inside)
    tl.store(again + row * 2 * E + at, z.to(again.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["out_row"])
def _output_backward(
    out, out_row, kept, scale, grad_out, grad_again, grad_product,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < E
    z = tl.load(out + row * out_row * E + at, mask=inside, other=0.0).to(tl.float32) / scale
    grad = tl.load(grad_out + row * out_row * E + at, mask=inside, other=0.0).to(tl.float32)
    grad += tl.load(grad_again + row * 2 * E + at, mask=inside, other=0.0).to(tl.float32)
    grad *= scale * (1 - z * z)
    if kept is not None:
        grad *= tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
    tl.store(grad_product + row * E + at, grad.to(grad_product.dtype.element_ty), mask=inside)


def forward(
    product: Tensor, given: Tensor, given_row: int, c: Tensor, after: Tensor, kept: Tensor | None, scale: float,
    x: Tensor | None, gain: Tensor, shift: Tensor, h: Tensor, out: Tensor, out_row: int,
) -> None:  # fmt: skip
    """A cell whose gates are product + given, [rows, 4E], and its state c -> its state `after`, h, and out = x'.

    Rows of given lie given_row * E apart, those of x and h 2E, those of out out_row * E.
    """
    rows, E = c.shape
    _advance[(rows,)](
        product, given, given_row, c, after, kept, scale, x, gain, shift, h, out, out_row, EPSILON,
        E, triton.next_power_of_2(E), num_warps=WARPS,
    )  # fmt: skip


def backward(
    product: Tensor, given: Tensor, given_row: int, c: Tensor, kept: Tensor | None, scale: float, x: Tensor | None,
    gain: Tensor, grads: tuple[Tensor, int, Tensor, Tensor | None], grad_h: Tensor,
    grad_cell: Tensor, grad_gates: Tensor, grad_x: Tensor, grad_norm: Tensor,
) -> None:  # fmt: skip
    """From the gradient of x', a sum of up to three, whose first's rows lie so many E apart, and of h, 2E apart.

    grad_cell turns from the gradient of `after` into that of c; grad_norm [rows, 2, E] grows by gain's and shift's.
    """
    rows, E = c.shape
    grad_a, grad_a_row, grad_b, grad_c = grads
    _advance_backward[(rows,)](
        product, given, given_row, c, kept, scale, x, gain, grad_a, grad_a_row, grad_b, grad_c, grad_h,
        grad_cell, grad_gates, grad_x, grad_norm, EPSILON,
        E, triton.next_power_of_2(E), num_warps=WARPS,
    )  # fmt: skip


def output(product: Tensor, kept: Tensor | None, scale: float, out: Tensor, again: Tensor) -> None:
    """dropout(tanh(product)) [rows, E], written twice: into out, of any distance between rows, and again, of 2E."""
    rows, E = product.shape
    settings = E, triton.next_power_of_2(E)
    _output[(rows,)](product, kept, scale, out, out.stride(0) // E, again, *settings, num_warps=WARPS)


def output_backward(
    out: Tensor, kept: Tensor | None, scale: float, grad_out: Tensor, grad_again: Tensor, grad_product: Tensor
) -> None:
    """The gradient of `product` from those of both outputs; grad_out lies as out does."""
    rows, E = out.shape
    settings = E, triton.next_power_of_2(E)
    row = out.stride(0) // E
    _output_backward[(rows,)](out, row, kept, scale, grad_out, grad_again, grad_product, *settings, num_warps=WARPS)
