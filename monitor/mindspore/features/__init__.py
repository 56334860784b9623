"""Features of a higher order: attention that collapses, weights that lose rank, routers that stop routing."""
