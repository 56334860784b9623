"""The precision dump of PyTorch."""
