"""Results as files, text and HTML. Independent of the measurement itself."""
