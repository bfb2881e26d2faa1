"""HTTP: routes, guards, request bodies, parameters, JSON and errors. Uses Litestar, but not gRPC, tensors or OpenCV."""
