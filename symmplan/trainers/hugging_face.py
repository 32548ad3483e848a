"""Hugging Face's ``Trainer``, and the trainers of TRL, which derive from it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from symmplan.fsdp import apply
from symmplan.runtime.options import Options, whole
from symmplan.trainers.metrics import watched
from symmplan.trainers.versions import require_tested

require_tested("transformers")

from transformers import TrainerCallback  # noqa: E402

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from symmplan.fsdp import Handle

__all__ = ["SymmplanCallback"]


class SymmplanCallback(TrainerCallback):
    """Applies symmplan when training begins, and removes it when training ends.

    For ``Trainer(..., callbacks=[SymmplanCallback()])``. The trainer shards the model with FSDP2:
    ``TrainingArguments(fsdp=True)``. Whenever the trainer logs the loss of steps, the numbers of
    `symmplan.trainers.watched` are in the same entry.

    Args:
        trainer: The trainer that the callback is added to. A trainer calls its callbacks in the
            order of its list, in which those of ``report_to`` precede the program's. With
            ``trainer.add_callback(SymmplanCallback(trainer))`` this one goes first, so that
            TensorBoard and W&B, too, get the numbers. Without it they are printed, and are in
            ``trainer.state.log_history``.
        **options: Those of `symmplan.fsdp.apply`.

    Attributes:
        handle: What `symmplan.fsdp.apply` returned for the last training; None before the first.

    Raises:
        TypeError: There is no such option.
        OptionError, BackendError: As `symmplan.fsdp.apply`, immediately.

    Collective: no. `on_train_begin` and `on_train_end` are called on all ranks.
    """

    def __init__(self, trainer: Trainer | None = None, **options: Any) -> None:
        checked = inspect.signature(apply).bind(None, **options).kwargs
        unsharded_modules = checked.pop("unsharded_modules", None)
        if unsharded_modules is not None:
            whole("unsharded_modules", unsharded_modules)
        Options(**checked)
        self.handle: Handle | None = None
        self._trainer = trainer
        self._options = options

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        *,
        model: nn.Module,
        **others: Any,  # noqa: ARG002
    ) -> None:
        """Apply symmplan: the model is sharded, and a checkpoint to resume from is loaded.

        Raises:
            CaptureError: The trainer did not shard the model with FSDP2.

        Collective: no.
        """
        if self._trainer is not None:
            callbacks = self._trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)
        if self.handle is not None:  # of a training that failed, and begins again
            self.handle.remove()
        self.handle = apply(model, **self._options)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        logs: dict[str, Any],
        **others: Any,  # noqa: ARG002
    ) -> None:
        """Add the numbers to an entry with the loss of steps. Collective: no."""
        if self.handle is not None and "loss" in logs:
            numbers = watched(self.handle)
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **others: Any,  # noqa: ARG002
    ) -> None:
        """Give FSDP2 its own collectives back, and the memory. Collective: no."""
        if self.handle is not None:
            self.handle.remove()
