"""The same policy where torch.compile traces.

`blocks` has what users call: compile and compile_attention, which `fastac` gives. `tracing` says what a policy means
for a region that somebody traces, AOT or another; `graphs` knows the graphs that torch.compile made, and sees to it
that none of them runs a saved attention again; `flex` keeps flex_attention an op in inductor's code; `torch_private`
holds what is private in torch's compiler. Import from these modules: the attribute `fastac.compile` is the function.
"""
