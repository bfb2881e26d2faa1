"""Search in images that were sent before: an index of images, objects, faces and text, and how images get into it.

It knows the engine that keeps them only by its port (`engine`), and asks models by cascades. Knows nothing of HTTP.
"""
