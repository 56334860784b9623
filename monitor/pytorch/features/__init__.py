"""Features: entropies, spectral norms, similarities of rows."""
