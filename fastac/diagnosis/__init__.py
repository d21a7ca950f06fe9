"""Finds attention that was not saved, and says why.

The first region of a kind is observed: `observation` opens an `observer`, a mode that sees every op, reads the graph
that the region leaves (`autograd_graph`), and runs compiled code once without its compiler (`eager_look`).
`recognition` says what looks like attention, `unknown` lists what fastac does not know. `every_step` is what later
steps are held to. `out_of_memory` explains an error of another kind. `tables` prints reports and plans.
"""
