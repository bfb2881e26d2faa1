"""The load driver: sends images to one server on this machine and counts the responses. Works with any server."""
