"""Bytes and FLOPs of a step under every policy, and the best policies for a memory.

Before training, without weights or GPU: `fake_model` prepares a model on fake tensors; `simulation` runs a step of it
and records allocations and FLOPs, and `repetition` repeats there what one of several alike blocks did. In training
`measured` has the same of a step that was measured. `timeline` reads from either the bytes that any policy holds at
each moment; `forecast` puts these together for one model and one size of inputs, and lists the outputs that could be
saved, the best first; `places` chooses for a number of bytes, or for the memories of device and host. `plans` has
`fastac.plan`, `video` plans a published model and a video, and `auto` chooses in training.
"""

from fastac.planning.auto import Auto
from fastac.planning.forecast import PolicyFigures, States
from fastac.planning.plans import Plan, plan

__all__ = ["Auto", "Plan", "PolicyFigures", "States", "plan"]
