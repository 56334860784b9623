"""Features of a higher order: what does not depend on whose tensors they are computed from."""
