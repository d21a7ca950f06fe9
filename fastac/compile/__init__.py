"""The same policy where torch.compile traces, and blocks compiled inside their own checkpoints.

`blocks` holds the public compile and compile_attention, `tracing` what a policy says of a region in a trace, `graphs`
what became of it in compiled code, `flex` the kernel of flex_attention as a call of its own.
"""
