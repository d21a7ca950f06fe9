"""Regions and their tapes: how a block runs and runs again, and what is kept in between.

Reading order: `region` (forward and recompute), `beginning` (what both begin with), `tape` (what a region records and
replays), `interception` (how calls get to the tape), `recompute` and `fingerprints` (comparison with the forward).
"""
