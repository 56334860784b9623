"""``trainermon precision``: what formats of low precision would lose of recorded tensors, and which layers are safe in them."""
