"""The load driver: sends images to one server on this machine and counts the answers. Never knows what serves them."""
