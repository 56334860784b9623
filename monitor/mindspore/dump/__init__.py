"""The precision dump of MindSpore's dynamic graph."""
