"""Attention, written once: for training, for stepwise decoding and for replaying a search.

B rows   D direction (0 l2r, 1 r2l)   H heads   Q queries of one direction   N keys of one   E width   d = E / H

Past attention reads a direction's own history, future attention reads its partner's. What tells training from
decoding is only which keys there are and a `View` that says which query reads which of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways import kernels
from bothways.nn.fusion import Fusion, Weighted
from bothways.nn.layers import Linear
from bothways.stepwise import Clock, roomier

FEW = 32  # queries of one source, or of one direction, that a step may have to be served by what is made for few


def partner(x: Tensor, dim: int = 1) -> Tensor:
    """What each direction sees of the other: l2r and r2l swapped along `dim`."""
    return x.flip(dim)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q · Kᵀ / √d) · V for [..., Q, d] over [..., N, d]; `mask` is true where a query may read a key."""
    few = q.size(-2) <= FEW and q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if few and mask is not None and not torch.is_grad_enabled():
        return _attend_by_few(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def _attend_by_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The formula as it stands, for the few queries of a step in bfloat16: there a CPU's fused attention is slow.

    Keys times queries, not queries times keys: with the long side first the keys are read as they lie.
    """
    found = torch.matmul(k, (q * q.size(-1) ** -0.5).transpose(-1, -2)).transpose(-1, -2)
    # The lowest number instead of -∞: a query that may read nothing then reads anything, where NaN would spread.
    bias = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    scores = torch.add(found, bias, out=torch.empty(found.shape))
    return torch.matmul(torch.softmax(scores, dim=-1, out=scores).to(v.dtype), v)


@dataclass(frozen=True)
class Chains:
    """Which slots the hypotheses of a step descend from, whom they read, and when it is: what a kernel reads of a View.

    An ancestor [b, d, k, t] is the slot that hypothesis k descends from at step t, or -1 where it consumed nothing.
    """

    ancestors: Tensor  # [B, D, K, room]
    clock: Clock
    partners: Tensor | None  # [B, D, K] slots of the other direction; None: nobody reads one
    shares: Tensor | None  # [B, D, K] zero: no future


@dataclass(frozen=True)
class View:
    """Which query reads which key of the decoder's self-attention; the same for every layer.

    The rows of a direction's mask are first its own queries, which read their past, and then its partner's, for whom
    the same keys are the future: keys and values are passed over once for both. P partners are mixed by weight.
    """

    mask: Tensor | None  # [B * D, 1, Q + Q * P, N]; Q rows only: no future is read; None: nor any but causal past
    weights: Tensor | None = (
        None  # [B, D, Q, P] how much of each partner's future a query takes; None: all of the only one
    )
    has_future: Tensor | None = None  # [B, D, Q] false where the future branch is skipped; None: nowhere
    chains: Chains | None = None  # stepwise, for a kernel: it needs nothing else
    words: Tensor | None = (
        None  # [B, D, N] of whole texts, whose queries and keys are the same places: mask, but for order
    )


@dataclass(frozen=True)
class History:
    """Keys and values of every token consumed so far, written in place: [B, D, H, room, K, d].

    Nothing is moved when hypotheses are selected: which slots a hypothesis descends from is kept in a small table of
    its own (`ancestors`), from which the mask is made.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int, int, int], like: Tensor) -> "History":
        """Room for `shape` = (B, D, H, room, K, d)."""
        return cls(like.new_empty(shape), like.new_empty(shape))  # what is not written yet is not read

    def roomier(self, room: int | None = None) -> "History":
        """With room for so many steps, or for twice as many."""
        return History(roomier(self.keys, 3, room), roomier(self.values, 3, room))

    def write(self, clock: Clock, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token's [B, D, H, K, d]; returns all keys and values so far, [B, D, H, window * K, d]."""
        clock.put(self.keys, 3, k)
        clock.put(self.values, 3, v)
        window = clock.window(self.keys.size(3))
        return self.keys[:, :, :, :window].flatten(3, 4), self.values[:, :, :, :window].flatten(3, 4)

    def keep(self, sentences: Tensor) -> "History":
        """Only these rows of the batch."""
        return History(self.keys[sentences], self.values[sentences])


class SelfAttention(nn.Module):
    """The encoder's self-attention: every word of a sentence reads every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.output = Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]; mask [B, 1, 1, S]."""
        qkv = self.qkv(x)
        if _is_short(qkv, x.size(-1), self.heads, x.size(1)):
            from bothways.kernels.attention import self_attention

            return self.output(self_attention(qkv, self.heads, mask.flatten(1), causal=False))
        q, k, v = split_heads(qkv, 3, self.heads)
        return self.output(join_heads(attend(q, k, v, mask)))


class SynchronousAttention(nn.Module):
    """The decoder's self-attention: each direction reads its own past and, with a fusion, its partner's words so far.

    past_l2r   = softmax(q_l2r · K_l2r[<=i]ᵀ / √d) · V_l2r[<=i]
    future_l2r = softmax(q_l2r · K_r2l[<=i]ᵀ / √d) · V_r2l[<=i]
    out_l2r    = past_l2r + λ · tanh(future_l2r)                 and mirrored for r2l; then the output projection
    """

    def __init__(self, width: int, heads: int, fusion: Fusion | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.output = Linear(width, width)
        self.fusion = fusion

    def forward(self, x: Tensor, view: View, history: History | None = None, clock: Clock | None = None) -> Tensor:
        """[B, D, Q, E] -> [B, D, Q, E]. With a history, Q are the K hypotheses' newest tokens, N all so far."""
        qkv = self.qkv(x)
        if history is not None and view.chains is not None:
            return self.output(self._along(view.chains, qkv, history))
        is_whole = history is None and (view.mask is None or view.words is not None)
        if is_whole and _is_short(qkv, x.size(-1), self.heads, x.size(2)):
            return self.output(self._of_streams(qkv, view.words))
        q, k, v = split_heads(qkv, 3, self.heads)  # [B, D, H, Q, d] each
        if history is not None and clock is not None:
            k, v = history.write(clock, k, v)
        if self.fusion is None or view.mask is None or view.mask.size(-2) == x.size(-2):
            heads = self._past(q, k, v, view)
        else:
            heads = self._past_and_future(q, k, v, view, self.fusion)
        return self.output(join_heads(heads))

    def _along(self, chains: Chains, qkv: Tensor, history: History) -> Tensor:
        """What the rest of this class computes for a step, by a kernel that also writes the history."""
        from bothways.kernels.chains import attend_along

        memory = history.keys, history.values, chains.ancestors, chains.clock.step
        if self.fusion is None or chains.partners is None or chains.shares is None:
            return attend_along(qkv, *memory)[0]
        partners = chains.partners, chains.shares
        if isinstance(self.fusion, Weighted):
            return attend_along(qkv, *memory, *partners, self.fusion.name, self.fusion.weight)[0]
        past, future = attend_along(qkv, *memory, *partners, "apart")
        fused: Tensor = self.fusion(*split_heads(past, 1, self.heads), *split_heads(future, 1, self.heads))
        return torch.where((chains.shares > 0)[..., None], join_heads(fused), past)

    def _of_streams(self, qkv: Tensor, words: Tensor | None) -> Tensor:
        """Whole texts on a GPU: [R, D, T, 3E] -> [R, D, T, E]."""
        from bothways.kernels.attention import self_attention

        rows = qkv.flatten(0, 1)
        past = self_attention(rows, self.heads, None, causal=True).view(*qkv.shape[:3], -1)
        if self.fusion is None or words is None:
            return past
        future = self_attention(rows, self.heads, words.flatten(0, 1), causal=True, partner=True).view(past.shape)
        fused: Tensor = self.fusion(*split_heads(past, 1, self.heads), *split_heads(future, 1, self.heads))
        return join_heads(fused)

    def _past(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        found = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), view.mask, causal=view.mask is None)
        return found.view(q.shape)

    def _past_and_future(self, q: Tensor, k: Tensor, v: Tensor, view: View, fusion: Fusion) -> Tensor:
        Q = q.size(3)
        P = 1 if view.weights is None else view.weights.size(-1)
        readers = partner(q) if P == 1 else partner(q).repeat_interleave(P, dim=3)  # the partner's queries
        rows = torch.cat([q, readers], dim=3)  # [B, D, H, Q + Q * P, d]
        found = attend(rows.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), view.mask).view(rows.shape)
        past, future = found[..., :Q, :], partner(found[..., Q:, :])
        if view.weights is not None:
            future = (future.unflatten(3, (Q, P)) * view.weights[:, :, None, :, :, None].to(future.dtype)).sum(4)
        fused = fusion(past, future)
        return fused if view.has_future is None else torch.where(view.has_future[:, :, None, :, None], fused, past)


class SourceAttention(nn.Module):
    """Encoder-decoder attention. Keys and values of a source are held once, however many streams read them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(width, width)
        self.kv = Linear(width, 2 * width)
        self.output = Linear(width, width)

    def remember(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, d] of encoded sources [B, S, E]."""
        k, v = split_heads(self.kv(encoded), 2, self.heads)
        if torch.is_grad_enabled():
            return k, v
        return k.contiguous(), v.contiguous()  # once, because every step reads them

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[R, D, Q, E] over sources [B, H, S, d], where each source is read by R / B rows in turn."""
        rows = self.query(x).view(keys.size(0), -1, x.size(-1))  # all of a source
        if rows.size(1) <= FEW and kernels.usable(rows) and not torch.is_grad_enabled() and rows.dtype != torch.float64:
            from bothways.kernels.sources import attend_to_source

            return self.output(attend_to_source(rows, keys, values, mask).view(x.shape))
        if _is_short(rows, x.size(-1), self.heads, keys.size(2)):
            from bothways.kernels.attention import source_attention

            return self.output(source_attention(rows, keys, values, mask.flatten(1)).view(x.shape))
        (q,) = split_heads(rows, 1, self.heads)
        return self.output(join_heads(attend(q, keys, values, mask)).view(x.shape))


def _is_short(x: Tensor, width: int, heads: int, keys: int) -> bool:
    """Whether the kernels for whole texts can attend: on a GPU, over short ones."""
    if not kernels.usable(x):
        return False
    from bothways.kernels.attention import fits

    return fits(x, width, heads, keys)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[..., Q, parts * E] -> `parts` tensors [..., H, Q, d]."""
    return tuple(part.unflatten(-1, (heads, -1)).transpose(-2, -3) for part in x.chunk(parts, dim=-1))


def join_heads(x: Tensor) -> Tensor:
    """[..., H, Q, d] -> [..., Q, E]."""
    return x.transpose(-2, -3).flatten(-2)
