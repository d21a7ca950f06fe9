"""Twins of a model of diffusers, whose own switches for checkpointing and attention backends are turned as well."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig

import fastac
from fastac.policy import Policy
from tests import support
from tests.random_models import Policies
from tests.random_steps import SECOND_BACKWARDS
from tests.twins import Twins

MODELS = ("WanTransformer3DModel", "LTXVideoTransformer3DModel", "CogVideoXTransformer3DModel")

SWITCHES = ("native", "_native_flash", "_native_math", "_native_efficient", "flash", "sage")
"""Attention backends: that save, that saves nothing, that runs on no CPU, that are not installed."""


@functools.cache
def _built(name: str) -> Any:
    return support.build(name)


class DiffusersTwins(Twins):
    """enabled: fastac is, and was not disabled by its own means. replaced: diffusers' own checkpointing is on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        _AttentionBackendRegistry._active_backend = AttentionBackendName.NATIVE
        self.name = name
        self.plain, self.checked = (copy.deepcopy(_built(name)[0]) for _ in range(2))
        self.enabled = self.replaced = False
        self.dtype = torch.float32

    def inputs(self, shape: int, seed: int) -> dict[str, Any]:
        """Of one sample or two."""
        generator, batch = torch.Generator().manual_seed(seed), shape % 2 + 1
        made = dict(_built(self.name)[1])
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                made[name] = value = value.detach()[:1].repeat(batch, *[1] * (value.dim() - 1))
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "timestep":
                made[name] = torch.randn(value.shape, generator=generator).to(self.dtype).requires_grad_()
        return made

    @property
    def backend(self) -> str:
        """Of its attention: its own, else that of the process. CogVideoX's processors know none."""
        processors = [module.processor for module in self.checked.modules() if hasattr(module, "processor")]
        own = [processor._attention_backend for processor in processors if hasattr(processor, "_attention_backend")]
        return str((own[0] or _AttentionBackendRegistry._active_backend).value) if own else "native"

    def put_on(self, policy: Policies, engine: str) -> None:
        if isinstance(policy, dict):
            container = "transformer_blocks" if hasattr(self.checked, "transformer_blocks") else "blocks"
            policy = {pattern.replace("blocks", container): value for pattern, value in policy.items()}
        super().put_on(policy, engine)

    def enable(self, policy: Policies, engine: str) -> None:
        """Refused at once where the backend saves nothing; then everything is as it was."""
        refused = self.backend == "_native_math" and any(one != "full" for one in self.parts_of(policy))
        try:
            super().enable(policy, engine)
            self.enabled, self.replaced = True, False
        except fastac.UnsupportedBackendError:
            assert refused
        else:
            assert not refused

    def disable(self) -> None:
        super().disable()
        if self.replaced:
            self.checked.disable_gradient_checkpointing()
        self.enabled = self.replaced = False

    # Operations

    def switch(self, backend: str) -> None:
        """The attention backend of both, and of the process."""
        errors = []
        for model in self.both:
            try:
                model.set_attention_backend(backend)
            except RuntimeError as error:
                errors.append(error)
        assert len(errors) in (0, 2)

    def switch_off(self) -> None:
        """Checkpointing, by diffusers' own means."""
        self.checked.disable_gradient_checkpointing()
        self.policy, self.replaced = None, False

    def replace(self) -> None:
        """Checkpointing, by diffusers' own: to be noticed where fastac was enabled."""
        self.checked.enable_gradient_checkpointing()
        self.replaced = True

    def adapt(self) -> None:
        """An adapter, with dropout, which alone trains."""
        if not hasattr(self.checked, "peft_config"):
            for model in self.both:
                torch.manual_seed(4)
                config = LoraConfig(r=2, target_modules=["to_q", "to_v"], lora_dropout=0.2, init_lora_weights=False)
                model.add_adapter(config)

    def cast(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        for model in self.both:
            torch.nn.Module.to(model, self.dtype)  # past diffusers' own, which warns

    def load(self, seed: int) -> None:
        torch.manual_seed(seed)
        state = {name: torch.randn_like(value) * 0.1 for name, value in self.checked.state_dict().items()}
        for model in self.both:
            model.load_state_dict(state)

    # What is to be

    def parts_of(self, policy: Policies | None) -> list[str | Policy]:
        """The policies that a mapping mixes."""
        return list(policy.values()) if isinstance(policy, dict) else [policy] if policy is not None else []

    def must_refuse(self, shape: int) -> bool:
        if self.replaced and self.enabled:
            return True
        saves = any(one != "full" for one in self.parts_of(self.policy))
        return saves and self.backend == "_native_math"

    def may_refuse(self, way: str, shape: int) -> bool:
        return self.must_refuse(shape) or (self.engine == "sac" and way in SECOND_BACKWARDS)

    def check_executions(self, executed: int, needed: int, way: str) -> None:
        if way != "inside a region":  # whose recompute need not come to its end
            assert executed >= needed
            assert executed == needed or self.policy != "attn_only"
