"""What hooks do in code that ``torch.compile`` has taken over: operators stand in it for them."""
