"""Exchanges that autograd follows: rows there, gradients back.

[Note: gradients overlap, too]
    An exchange that is started and waited for apart is two functions of autograd. The backward of
    the wait starts to send the gradients, that of the start waits for them. In between autograd
    runs the backward of what the program ran in between.

``via`` is the `symmplan.integrate.moe.dispatcher.ExpertParallel` that moves the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from symmplan.integrate.moe.exchanges import RowExchange
    from symmplan.integrate.moe.routes import PaddedRoutes, Routes

__all__ = ["Pending", "differentiable", "pending"]


class Pending:
    """An exchange that was started: ``dispatch`` and ``combine`` return it with ``async_op=True``.

    Do not write the rows that were passed, and do not read the result, before `wait`.
    """

    def __init__(self, result: torch.Tensor, via: Any, exchange: RowExchange) -> None:
        self._result, self._via, self._exchange = result, via, exchange
        self._waited = False

    def __repr__(self) -> str:
        state = "waited for" if self._waited else "on their way"
        return f"<rows {tuple(self._result.shape)} {state}>"

    def wait(self) -> torch.Tensor:
        """Wait for the rows and return them. On a device the current stream waits, not the host.

        As with torch's ``Work``, later work of the stream sees the rows. May be called again.

        Raises:
            The errors of the call that started the exchange.

        Collective: yes, the first time, and so is its backward. If a later exchange was started,
        that one has already ended this one.
        """
        if not self._waited:
            self._waited = True
            self._result = _Wait.apply(  # type: ignore[no-untyped-call]
                self._result, self._via, self._exchange
            )
        else:
            self._via.end(self._exchange)
        return self._result


def differentiable(rows: torch.Tensor, via: Any, routes: Routes | PaddedRoutes) -> torch.Tensor:
    """An exchange. Collective: yes, and so is its backward."""
    return _Exchange.apply(rows, via, routes)  # type: ignore[no-any-return,no-untyped-call]


def pending(rows: torch.Tensor, via: Any, routes: Routes | PaddedRoutes) -> Pending:
    """An exchange that is only started. Collective: yes, and so is its backward."""
    started: list[RowExchange] = []
    result: Any = _Start.apply(rows, via, routes, started)  # type: ignore[no-untyped-call]
    return Pending(result, via, started[0])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, via: Any, routes: Routes | PaddedRoutes
    ) -> torch.Tensor:
        ctx.via, ctx.back = via, routes.back
        return via.exchange(rows, routes)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return differentiable(gradient, ctx.via, ctx.back), None, None


class _Start(torch.autograd.Function):
    """See [Note: gradients overlap, too]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        via: Any,
        routes: Routes | PaddedRoutes,
        started: list[RowExchange],
    ) -> torch.Tensor:
        exchange = via.start(rows, routes)
        started.append(exchange)
        ctx.via, ctx.exchange = via, exchange
        assert exchange.result is not None
        return exchange.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        # That says nothing: the gradient that `_Wait` got is on its way since.
        returns, ctx.exchange.returns = ctx.exchange.returns, None
        return returns.wait(), None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, via: Any, exchange: RowExchange) -> torch.Tensor:
        ctx.via, ctx.exchange = via, exchange
        via.end(exchange)
        ctx.mark_dirty(result)  # it gets its values here
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.exchange.returns = pending(gradient, ctx.via, ctx.exchange.routes.back)
        return gradient, None, None
