"""Results as files, text and HTML. Knows what was measured; never knows how."""
