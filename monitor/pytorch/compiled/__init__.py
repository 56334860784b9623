"""Hooks in code compiled by ``torch.compile``: operators replace them there."""
