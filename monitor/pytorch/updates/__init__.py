"""What a step does: whether gradients agree with momenta, how much weights change, and what Adam makes of its moments."""
