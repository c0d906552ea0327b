"""What models and search say to each other: distributions that are read in part, and the time."""

import pytest
import torch
from torch import Tensor

from bothways.stepwise import FIRST_ROOM, Clock, Distribution, roomier
from bothways.tokens import END, PAD

CPU = torch.device("cpu")


def logits() -> Tensor:
    return torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("first", [END, END + 1])
def test_what_comes_before_the_first_token_is_impossible(first: int) -> None:
    log_probs = Distribution(logits(), first).log_probs()
    assert (log_probs[..., :first] == -torch.inf).all()
    torch.testing.assert_close(log_probs[..., first:], torch.log_softmax(logits()[..., first:], -1))


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_largest_are_those_of_all(is_normalized: bool) -> None:
    log_probs = Distribution(logits()).log_probs()
    values, tokens = Distribution(
        log_probs.clone() if is_normalized else logits(), is_normalized=is_normalized
    ).largest(4)
    expected = log_probs.topk(4)
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(tokens, expected.indices)


def test_only_one_token_or_any() -> None:
    log_probs = Distribution(logits()).log_probs()
    token = torch.tensor([[7, PAD, 8], [PAD, 9, PAD]])
    found = Distribution(logits()).only(token).log_probs()
    for i, row in enumerate(token.flatten().tolist()):
        expected, mine = log_probs.view(6, -1)[i], found.view(6, -1)[i]
        if row == PAD:
            torch.testing.assert_close(mine, expected)
        else:
            assert mine[row] == expected[row] and (mine > -torch.inf).sum() == 1


def test_a_clock_goes_on_in_python_or_on_the_device_alone() -> None:
    clock = Clock.start(CPU).ticked().ticked()
    assert (int(clock.step), clock.taken, clock.window(8), clock.is_full(2), clock.is_full(3)) == (2, 2, 3, True, False)
    alone = clock.on_device_only()
    assert (alone.window(8), alone.is_full(2), alone.written(4).tolist()) == (8, False, [True, True, True, False])
    assert alone.ticked() is alone and int(alone.step) == 3


@pytest.mark.parametrize("alone", [False, True])
def test_a_clock_says_where_to_write(alone: bool) -> None:
    clock = Clock.start(CPU).ticked()
    x, value = torch.zeros(2, 3, 4), torch.ones(2, 4)
    (clock.on_device_only() if alone else clock).put(x, 1, value)
    assert torch.equal(x[:, 1], value) and x.sum() == 8


def test_room_doubles_and_keeps_what_is_there() -> None:
    x = torch.arange(6).view(2, 3)
    assert roomier(x[:, :0], 1).shape == (2, FIRST_ROOM)
    assert torch.equal(roomier(torch.arange(40).view(2, 20), 1)[:, :20], torch.arange(40).view(2, 20))
    assert roomier(torch.arange(40).view(2, 20), 1).shape == (2, 40)
    assert roomier(x, 1, 5).shape == (2, 5) and roomier(x, 1, 2) is x


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_one_token_each_is_what_all_of_them_say(
    by_kernel: bool, is_normalized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr("bothways.kernels.usable", lambda _: True)
    log_probs = Distribution(logits()).log_probs()
    tokens = torch.tensor([[END, 17, 299], [128, END, 4 + END]])
    one = Distribution(log_probs.clone(), is_normalized=True) if is_normalized else Distribution(logits())
    expected = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(one.of(tokens), expected, atol=1e-6, rtol=1e-6)
