"""What every policy holds and recomputes, before training: bytes and FLOPs of a step, without weights or GPU.

`simulation` runs a step on fake tensors and notes allocations and FLOPs, of the model that `subject` prepares;
`timeline` reads from that what any policy holds at each moment; `knapsack` chooses outputs for a number of bytes;
`forecast` puts these together for one model and one size of inputs; `plans` is what users get, and `video` the same for
a published model and a video.
"""

from fastac.planning.forecast import PolicyPlan, States
from fastac.planning.plans import Plan, plan

__all__ = ["Plan", "PolicyPlan", "States", "plan"]
