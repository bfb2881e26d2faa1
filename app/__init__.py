"""Nereid: a picture goes in over HTTP, named boxes come out of a model in Triton.

A request crosses the modules in this order, and imports go the same way:

    routes -> guards -> body, parameters -> detector -> sniff, image, jpeg -> letterbox -> transport, arena
    -> triton, tensors, contract -> rows, nms -> detections -> schema

`envelope`, `problems` and `stages` go along with each; `main` puts the parts together, `__main__` is the command
line. `bundle`, `embedded`, `supervisor`, `catalogue`, `pull` and `compose` get and run the Triton and the models that
a machine without any of them needs; no request passes through them.
"""

__version__ = "0.1.0"
