"""report and verify: figures of a model's blocks, and a proof that they are exact on the user's own model."""
