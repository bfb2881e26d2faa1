"""Conversion of a result or an error to a response: JSON, a picture, problem+json."""
