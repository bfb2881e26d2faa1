"""Results of models for images that were sent before, and identical questions under way. `opening` alone knows the Tritons."""
