"""RichProgressCallback: a live panel on a terminal or in a notebook, one plain line a log everywhere else.

It only ever reads: logs are neither changed nor kept, and the main process alone draws.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console, RenderableType
from rich.errors import LiveError
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from preftune.callbacks.formatting import as_number, format_count
from preftune.callbacks.live import LiveDisplay, can_animate
from preftune.callbacks.metric_names import DRIFT, LAST_MOVE, MOVES
from preftune.callbacks.panel import Bar, RunView, belongs_on_board, plain_line, render
from preftune.callbacks.throughput import Throughput
from preftune.models.adapters import peft_model
from preftune.models.load import model_name
from preftune.models.structure import unwrap


class RichProgressCallback(TrainerCallback):
    """Bars, speed, time left, memory and metrics by group; use it instead of transformers' bar.

    The bar or printer that `transformers.Trainer` adds by default is removed, whatever `disable_tqdm` says.

    Args:
        console: Where to draw; the default is standard output. One given is trusted about being a terminal.
        refresh_per_second: How often the live panel is redrawn.
    """

    def __init__(self, console: Console | None = None, *, refresh_per_second: float = 2.0):
        self._console_given = console is not None
        self._console = console
        self._refresh_per_second = refresh_per_second
        self._display: LiveDisplay | None = None
        self._view = RunView()
        self._throughput = Throughput()
        self._training = False

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without the terminal: a copy starts with a display of its own."""
        return {**self.__dict__, "_display": None, "_console": None, "_console_given": False}

    @property
    def console(self) -> Console:
        # made late, so that it writes to the standard output of the moment, as a test or a notebook set it
        if self._console is None:
            self._console = Console()
        return self._console

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._be_the_only_bar()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._be_the_only_bar()
        self.close()
        self._training = True
        tokens = _tokens_logged(state)
        self._throughput = Throughput(time.monotonic(), tokens)
        self._view = RunView(
            about=_about(args, kwargs.get("model")),
            subtitle=args.output_dir or "",
            train=Bar(state.global_step, state.max_steps if state.max_steps > 0 else None),
            steps_at_start=state.global_step,
            epoch=state.epoch,
            num_tokens=tokens,
        )
        self._open()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training and self._view.train is not None:
            bar = dataclasses.replace(self._view.train, done=state.global_step)
            self._view = dataclasses.replace(self._view, train=bar, epoch=state.epoch)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        bar = self._view.evaluation
        if bar is None:
            self._throughput.pause(time.monotonic())
            if not self._training:
                self._view = RunView(about=_about(args, kwargs.get("model")), subtitle=args.output_dir or "")
            bar = Bar(0, len(eval_dataloader) if eval_dataloader is not None and has_length(eval_dataloader) else None)
        self._view = dataclasses.replace(self._view, evaluation=dataclasses.replace(bar, done=bar.done + 1))
        if self._display is None:
            self._open()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The metrics came by `on_log` before."""
        self._end_evaluation(state)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Nothing logs these metrics, so they are shown here."""
        if state.is_world_process_zero and metrics:
            self._show(metrics)
        self._end_evaluation(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            self._show(logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training:
            self._view = dataclasses.replace(self._view, finished=time.monotonic(), evaluation=None)
            self.close()

    def close(self) -> None:
        """Leaves the panel as it is and gives the terminal back; safe to call at any time, also twice."""
        self._training = False
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _open(self) -> None:
        if not can_animate(self.console, given=self._console_given):
            return
        display = LiveDisplay(self.console, self._render, refresh_per_second=self._refresh_per_second)
        try:
            display.start()
        except LiveError:  # rich before 14.1, while somebody else's live display is shown
            return
        self._display = display

    def _render(self) -> RenderableType:
        return render(dataclasses.replace(self._view, memory=_memory()), ascii_only=self.console.options.ascii_only)

    def _show(self, logs: Mapping[str, Any]) -> None:
        tokens = as_number(logs.get("num_tokens"))
        if tokens is not None:
            rate = self._throughput.update(time.monotonic(), tokens)
            self._view = dataclasses.replace(self._view, num_tokens=tokens, tokens_per_second=rate)
        self._view = dataclasses.replace(
            self._view,
            board=self._view.board.with_logs({k: v for k, v in logs.items() if belongs_on_board(k)}),
            epoch=as_number(logs.get("epoch", self._view.epoch)),
            drift=as_number(logs.get(DRIFT, self._view.drift)),
            moves=as_number(logs.get(MOVES, self._view.moves)),
            last_move=as_number(logs.get(LAST_MOVE, self._view.last_move)),
        )
        if self._display is None or not self._display.is_alive():
            line = plain_line(self._view, logs, ascii_only=self.console.options.ascii_only)
            self.console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def _end_evaluation(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        self._throughput.resume(time.monotonic())
        if self._training:
            self._view = dataclasses.replace(self._view, evaluation=None)
            return
        self.close()
        self._view = RunView()

    def _be_the_only_bar(self) -> None:
        handler = _handler_calling(self)
        if handler is not None:
            # a new list: the handler is walking through the old one
            handler.callbacks = list(handler.callbacks)
            replace_default_progress(handler.callbacks)


def replace_default_progress(callbacks: list[TrainerCallback]) -> None:
    """Removes, in place, the bar or printer that transformers adds by default, if a `RichProgressCallback` is there."""
    from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # another class in a notebook

    if not any(isinstance(c, RichProgressCallback) for c in callbacks):
        return
    defaults = (ProgressCallback, PrinterCallback, DEFAULT_PROGRESS_CALLBACK)
    removed = [c for c in callbacks if type(c) in defaults]
    callbacks[:] = [c for c in callbacks if type(c) not in defaults]
    for callback in removed:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.leave = False
            callback.training_bar.close()
            callback.training_bar = None


def _handler_calling(callback: TrainerCallback) -> CallbackHandler | None:
    """The handler that is firing the current event: no event passes it, and a plain Trainer adds its bar after us."""
    frame = sys._getframe(1)
    for _ in range(5):
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler) and callback in owner.callbacks:
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _about(args: TrainingArguments, model: Any) -> tuple[str, ...]:
    """What is trained by which method, and the name of the run where it has one of its own."""
    method = type(args).__name__.removesuffix("Config").removesuffix("TrainingArguments")
    run = args.run_name if args.run_name != args.output_dir else None
    return tuple(part for part in (method, _model_name(model), run) if part)


def _model_name(model: Any) -> str:
    """The last part of the name that it was loaded by; the class of one that has none."""
    if not isinstance(model, torch.nn.Module):
        return ""
    peft = peft_model(model)
    inner = unwrap(model) if peft is None else peft.get_base_model()
    return Path(model_name(inner)).name if isinstance(inner, PreTrainedModel) else type(inner).__name__


def _tokens_logged(state: TrainerState) -> float | None:
    """The token count that a resumed run goes on from; 0 at the start of a run."""
    if state.global_step == 0:
        return 0.0
    counts = (as_number(entry.get("num_tokens")) for entry in reversed(state.log_history))
    return next((count for count in counts if count is not None), None)


def _memory() -> str:
    text = f"{_bytes(psutil.Process().memory_info().rss)} RAM"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        text += f", {_bytes(torch.cuda.max_memory_allocated())} GPU peak"
    return text


def _bytes(count: int) -> str:
    """`2.71 GB`."""
    text = format_count(count)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"
