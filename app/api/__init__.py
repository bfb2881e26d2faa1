"""HTTP: routes, guards, request bodies, parameters, JSON and errors. Knows Litestar; never knows gRPC, tensors or OpenCV."""
