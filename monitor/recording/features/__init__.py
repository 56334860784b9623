"""Features of attention, weights and routers: the parts that are common to all frameworks."""
