"""BEMA (arXiv:2508.00180): a moving average of the trained weights with its lag corrected, saved at the end of the run.

It can also be the reference. It reads the policy and never writes it, and draws no random numbers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from preftune.callbacks.handler import ReferenceMover
from preftune.errors import CheckpointError, ConfigError, ReferenceError
from preftune.models.adapters import active_adapter, peft_model
from preftune.models.averaging import bema, bias_weight, ema, ema_weight
from preftune.models.distributed import full_state_dict, local_shard, reshard, unwrap
from preftune.models.reference import FrozenCopy, MovableReference
from preftune.models.virtual_tokens import virtual_tokens_of

logger = logging.getLogger(__name__)


class BEMACallback(ReferenceMover):
    """Keeps BEMA of the trained parameters and saves it as `{output_dir}/bema`, to be loaded with `from_pretrained`.

    At step t = `update_after` the weights theta_0 are taken. Every `update_freq` steps after it

        beta_t = max((lag + multiplier * t) ^ -ema_power, min_ema_multiplier)
        alpha_t = (lag + multiplier * t) ^ -bias_power
        EMA <- (1 - beta_t) EMA + beta_t theta_t        average = EMA + alpha_t (theta_t - theta_0)

    `bias_power=0` keeps the full correction for ever, a large one makes it vanish, a negative one switches it off: the
    average is then the plain EMA.

    Args:
        update_freq: Steps from one update to the next.
        ema_power: How fast beta falls.
        bias_power: How fast the correction falls.
        lag: At least 1 together with `multiplier * t`, else beta would exceed 1.
        update_after: The step of theta_0; no update up to it.
        multiplier: Scales the step.
        min_ema_multiplier: Lower bound of beta.
        device: Where theta_0, EMA and the average are kept, in float32: three times the trained parameters.
        update_ref_model: Also write the average to the reference.
        ref_model_update_freq: Steps from one such write to the next.
        ref_model_update_after: No write before this step.

    Raises:
        ConfigError: an option out of range.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = torch.device(device)
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq = ref_model_update_freq
        self.ref_model_update_after = ref_model_update_after
        self._check_options()
        self._forget()
        self._policy: nn.Module | None = None
        self._reference: MovableReference | None = None
        self._restored_step: int | None = None

    @property
    def moves_reference(self) -> bool:
        return self.update_ref_model

    # Events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._policy = unwrap(model)
        if self.update_ref_model:
            self._reference = self._find_reference(kwargs)
        if self._restored_step is not None:
            self._check_restored(state.global_step)
            return
        self._forget()
        if state.global_step > self.update_after:
            logger.warning(
                "BEMA starts anew from the weights of step %d: the state of its first steps was not in the checkpoint.",
                state.global_step,
            )
        if state.global_step >= self.update_after:
            self._take_snapshot()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        self._step = step
        if step == self.update_after:
            self._take_snapshot()
        elif step > self.update_after and (step - self.update_after) % self.update_freq == 0:
            self._update_bema_weights(step)
        if self._is_reference_step(step):
            assert self._reference is not None
            self._reference.blend_(self.average, 1.0, policy=model, step=step)

    def on_train_end(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        if self.average:
            self._save(os.path.join(args.output_dir, "bema"), processing_class, write=args.should_save)
        else:
            logger.warning("BEMA saved nothing: training ended before step update_after=%d.", self.update_after)
        self._policy = self._reference = None

    # State, for the checkpoint

    def state_dict(self) -> dict[str, Any]:
        """theta_0, EMA and the average by parameter name (this rank's shards), and the last step seen."""
        parts = {"theta_0": self.theta_0, "ema": self.ema, "average": self.average}
        tensors = {f"{part}.{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
        return {"step": self._step, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the state back; the next `on_train_begin` then goes on from it instead of starting anew."""
        parts: dict[str, dict[str, Tensor]] = {"theta_0": {}, "ema": {}, "average": {}}
        for key, value in state.items():
            if isinstance(value, Tensor):
                part, name = key.split(".", 1)
                parts[part][name] = value.to(self.device, copy=True)
        self.theta_0, self.ema, self.average = parts["theta_0"], parts["ema"], parts["average"]
        self._step = self._restored_step = state["step"]

    # The average

    def _forget(self) -> None:
        self.theta_0: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self._step = 0

    @torch.no_grad()
    def _theta(self) -> dict[str, Tensor]:
        """The trained parameters now: shards by name, on our device, at least float32, sharing nothing."""
        assert self._policy is not None
        reshard(self._policy)
        theta = {}
        for name, parameter in self._policy.named_parameters():
            if parameter.requires_grad:
                shard = local_shard(parameter)
                theta[name] = shard.to(self.device, torch.promote_types(shard.dtype, torch.float32), copy=True)
        return theta

    def _take_snapshot(self) -> None:
        self.theta_0 = self._theta()
        self.ema = {name: tensor.clone() for name, tensor in self.theta_0.items()}
        self.average = {name: tensor.clone() for name, tensor in self.theta_0.items()}

    @torch.no_grad()
    def _update_bema_weights(self, step: int) -> None:
        schedule = {"lag": self.lag, "multiplier": self.multiplier}
        beta = ema_weight(step, power=self.ema_power, minimum=self.min_ema_multiplier, **schedule)
        alpha = bias_weight(step, power=self.bias_power, **schedule)
        for name, theta in self._theta().items():
            self.ema[name] = ema(self.ema[name], theta, beta)
            self.average[name] = bema(self.ema[name], theta, self.theta_0[name], alpha)

    # The reference

    def _is_reference_step(self, step: int) -> bool:
        # up to update_after there is no average yet, and the reference is left where it is
        if not self.update_ref_model or not self.average or step < max(1, self.ref_model_update_after):
            return False
        return (step - self.ref_model_update_after) % self.ref_model_update_freq == 0

    def _find_reference(self, event: Mapping[str, Any]) -> MovableReference:
        reference = event.get("reference")
        if reference is None and isinstance(event.get("ref_model"), nn.Module):
            reference = FrozenCopy(event["ref_model"])
        if reference is None:
            raise ValueError(
                "BEMACallback(update_ref_model=True) got no ref_model with its events: this trainer has no reference, "
                "or its callback handler does not pass it. Use a trainer of preftune with a reference, or install "
                "preftune.RefModelCallbackHandler as trainer.callback_handler."
            )
        if not isinstance(reference, MovableReference):
            raise ReferenceError(f"BEMACallback cannot write to a reference of the form {reference.form!r}.")
        return reference

    # Saving

    def _save(self, folder: str, processing_class: Any, *, write: bool) -> None:
        assert self._policy is not None
        policy = self._policy
        state = full_state_dict(policy, self.average)
        if not write:
            return
        os.makedirs(folder, exist_ok=True)
        peft = peft_model(policy)
        if peft is not None:
            _save_adapter(peft, folder, state)
        elif isinstance(policy, PreTrainedModel):
            policy.save_pretrained(folder, state_dict=state)
        else:
            tensors = {name: state[name].contiguous() for name, _ in policy.named_parameters()}
            save_file(tensors, os.path.join(folder, "model.safetensors"))
        if isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
            processing_class.save_pretrained(folder)

    # Checks

    def _check_options(self) -> None:
        for name in ("update_freq", "ref_model_update_freq"):
            if vars(self)[name] < 1:
                raise ConfigError(f"{name} is {vars(self)[name]}; wanted at least 1 step.")
        for name in ("update_after", "ref_model_update_after", "ema_power", "multiplier"):
            if vars(self)[name] < 0:
                raise ConfigError(f"{name} is {vars(self)[name]}; wanted 0 or more.")
        if not 0.0 <= self.min_ema_multiplier <= 1.0:
            raise ConfigError(f"min_ema_multiplier is {self.min_ema_multiplier}; wanted a share in [0, 1].")
        first = self.update_after + self.update_freq
        if self.lag + self.multiplier * first < 1:
            raise ConfigError(
                f"lag + multiplier * t is {self.lag + self.multiplier * first} at the first update (t = {first}), so "
                "the weight of the newest value would exceed 1. Set lag to at least 1."
            )

    def _check_restored(self, step: int) -> None:
        restored, self._restored_step = self._restored_step, None
        if restored != step:
            raise CheckpointError(f"the BEMA state is of step {restored}, but training goes on from step {step}.")
        theta = self._theta() if self.theta_0 else {}
        names = theta.keys() | self.theta_0.keys()
        wrong = [n for n in names if n not in theta or n not in self.ema or theta[n].shape != self.ema[n].shape]
        if wrong:
            raise CheckpointError(
                f"the BEMA state does not fit the trained parameters of this run: {sorted(wrong)[:3]} differ. Use the "
                "model and the PEFT options of the run that wrote the checkpoint."
            )


def _save_adapter(model: PeftModel, folder: str, state: dict[str, Tensor]) -> None:
    name = active_adapter(model)
    with virtual_tokens_of(model, state):
        model.save_pretrained(folder, state_dict=state, selected_adapters=[name])
    # PEFT puts any adapter but "default" one level deeper, where from_pretrained(folder) does not look
    inner = os.path.join(folder, name)
    if name != "default":
        for file in os.listdir(inner):
            os.replace(os.path.join(inner, file), os.path.join(folder, file))
        os.rmdir(inner)
