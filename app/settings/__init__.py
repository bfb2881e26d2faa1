"""The settings: what they mean, how they are read and which values fit together. Knows nothing else of Nereid."""
