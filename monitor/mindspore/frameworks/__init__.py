"""What MindSpore keeps of a parameter: gradients, weights and moments."""
