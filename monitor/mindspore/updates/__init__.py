"""What an optimizer's step does to the weights, measured against the weights, the momentum and the rule."""
