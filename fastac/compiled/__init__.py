"""The same policy in code that torch.compile traces, and blocks compiled inside their own checkpoints.

`blocks` compiles blocks, `tracing` applies a policy to a region in a trace, `graphs` notes what it decided there,
`flex` makes the kernel of flex_attention an op of its own that compiled code calls.
"""
