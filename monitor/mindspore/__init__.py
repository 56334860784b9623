"""MindSpore: what catches the tensors of a training loop."""
