"""Text: from the outputs of detectors and readers of text to lines and characters."""
