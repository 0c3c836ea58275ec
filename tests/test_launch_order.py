"""Which gradients are sent after the backward. That the bits stay: `test_iteration_moves.py`."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from graphopt.schedule import Send, hold_back


def sends(sizes: list[int]) -> list[Send]:
    """As a backward makes them: what is made last is needed first."""
    graph = fx.Graph()
    launches = [graph.placeholder(f"g{i}") for i in range(len(sizes))]
    count = len(sizes)
    return [
        Send(n, size, count - i) for i, (n, size) in enumerate(zip(launches, sizes, strict=True))
    ]


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.floats(0, 0.99, allow_nan=False)
)
def test_order(sizes: list[int], share: float) -> None:
    given_sends = sends(sizes)
    order = hold_back(given_sends, share)
    assert sorted(order.sends, key=given_sends.index) == given_sends
    assert order.at_once[-1] is given_sends[-1]
    assert list(order.at_once) == [s for s in given_sends if s in order.at_once]
    assert [s.due for s in order.held] == sorted(s.due for s in order.held)
    held = sum(send.nbytes for send in order.held)
    assert abs(held - share * sum(sizes[:-1])) <= max(sizes) + 1


def test_a_third_of_equal_sizes() -> None:
    given_sends = sends([4] * 8)
    order = hold_back(given_sends, 1 / 3)
    assert [given_sends.index(send) for send in order.sends] == [0, 2, 3, 5, 6, 7, 4, 1]
    assert hold_back(given_sends, 0).held == ()


def test_what_some_rank_waits_for_is_sent_at_once() -> None:
    """Those beside it take its share."""
    given_sends = sends([4] * 8)
    given_sends[1] = replace(given_sends[1], now=True)
    order = hold_back(given_sends, 1 / 3)
    assert [given_sends.index(send) for send in order.sends] == [0, 1, 3, 5, 6, 7, 4, 2]
