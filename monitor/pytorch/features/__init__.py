"""Features of a higher order: entropies, spectral norms, similarities."""
