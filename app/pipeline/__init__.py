"""One request from encoded image to the answer of a model. Joins imaging, Triton and the tasks; never knows HTTP or gRPC."""
