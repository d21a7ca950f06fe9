"""The tape: attention outputs recorded in a region's forward, handed back in its recompute. Imports nothing above it.

Reading order: `tape` (what is recorded and replayed), `interception` (how ops get there), `generators`.
"""
