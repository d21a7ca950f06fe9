"""Regions and their tapes: how a block is run and run again, and what is kept in between. Imports nothing above it.

Reading order: `region` (forward and recompute), `tape` (what is recorded and replayed), `interception` (how ops get
there), `generators`, `comparison` (of recompute with forward).
"""
