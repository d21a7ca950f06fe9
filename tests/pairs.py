"""Releases of torch and diffusers that are tried together."""

DIFFUSERS = {
    "2.9.1": "0.33.1",
    "2.10.0": "0.36.0",
    "2.11.0": "0.39.0",
    "2.12.1": "0.40.0",
    "2.13.0": "0.42.1",
    "2.14.1": "0.42.1",
    "2.15.0": "0.42.1",
}
"""Release of torch -> the diffusers that it is tried with."""

FAMILIES = "Wan or LTX or HunyuanVideoTransformer or CogVideoX"
"""Models that every pair is tried with, as pytest selects them by `-k`."""
