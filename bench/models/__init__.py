"""Models for measurements: their configs, and an implementation of detectors and one of vectors."""
