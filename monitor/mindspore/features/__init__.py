"""Computes features of weights, routers, attention and outputs in MindSpore, and finds their tensors."""
